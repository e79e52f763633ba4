"""Runs each ATen call a second time on the reference and judges it. A probe calls it before and after every call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensorprobe import torch_names
from tensorprobe.errors import TrainingStopped
from tensorprobe.model.event import Event
from tensorprobe.model.interrupts import is_from_program, let_through
from tensorprobe.model.online import OpCount
from tensorprobe.model.reason import NotCompared
from tensorprobe.model.sink import AtenNumbers
from tensorprobe.watches.online.chain import Chain, Compared
from tensorprobe.watches.online.lifting import (
    Arguments,
    CannotLift,
    OpPlan,
    demand_numbers,
    lift,
    lift_tensor,
    plan_op,
)
from tensorprobe.watches.online.policies import Measures, Sampler
from tensorprobe.watches.online.reference import NoReference, Outputs, outputs_of
from tensorprobe.watches.online.verdict import Case, Judged, decide
from tensorprobe.watches.online.workers import Workers

Found = Callable[[Case, Event, int, int, list[Judged], "Compared | None"], None]
"""Called for every compared call with the case, its event, step and order, the rows, and the errors against the chain."""


INTERRUPTED = "interrupted by an exception of the program"


class _Open(NamedTuple):
    func: Any
    plan: OpPlan
    event: Event
    step: int
    given: Arguments
    lifted: Arguments
    order: int
    precision: str
    chained: Any


class Checker:
    """The second execution. `found` receives the rows of each call. Without workers, it may raise TrainingStopped."""

    def __init__(
        self,
        *,
        precision: str,
        measures: Measures,
        sampler: Sampler,
        workers: Workers,
        libraries: frozenset[str],
        found: Found,
        chain: Chain | None = None,
        heal: bool = False,
        narrow: bool = False,
    ) -> None:
        self._precision, self._measures, self._sampler, self._workers = precision, measures, sampler, workers
        self._libraries, self._found, self._chain, self._heal = libraries, found, chain, heal
        self._narrow = narrow
        self._plans: dict[Any, OpPlan] = {}
        self._lock = threading.Lock()
        self._begun, self._has_stopped = 0, False
        self.seen = self.compared = self.filtered = self.unsampled = self.broken = self.healed = 0
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.ops: dict[str, OpCount] = {}
        self.first_error: str | None = None
        self.stop: TrainingStopped | None = None
        """Raised once, before the next call of the training thread. Code that saves a checkpoint then works as usual."""

    def begin(self, func: Any, args: Any, kwargs: Any, numbers: AtenNumbers) -> _Open | None:
        """Lift the inputs of a call, if it is to be compared."""
        if self.stop is not None:
            stop, self.stop = self.stop, None
            raise stop
        given = Arguments(args, kwargs)
        self.seen += 1
        try:
            plan = self._plans.get(func)
            if plan is None:
                plan = self._plans[func] = plan_op(func, self._libraries)
            if not plan.counted:
                self.seen -= 1
                return None
            opened = self._open(func, plan, given, numbers)
            if self._chain is not None and (opened is None or plan.draws):
                self._chain.pass_by(plan, given)
        except BaseException as error:
            if is_from_program(error):  # the call is not made
                self.seen -= 1
                raise
            self._break(str(func), error)
            return None
        return opened

    def _open(self, func: Any, plan: OpPlan, given: Arguments, numbers: AtenNumbers) -> _Open | None:
        reason = plan.skip or (NotCompared.RANDOM if plan.dropout is not None and given[plan.dropout] else None)
        if reason is not None:
            self._skip(reason, plan.name)
            return None
        event = self._choose(plan, given, numbers)
        if event is None:
            return None
        precision = self.precision_of(given)
        try:
            lifted = lift(plan, given, precision, copies=bool(self._workers))
            chained = None if self._chain is None or plan.draws else self._chain.lift(plan, given)
        except CannotLift as error:
            self._skip(str(error), plan.name)
            return None
        with self._lock:
            order, self._begun = self._begun, self._begun + 1
            self.compared += 1
        return _Open(func, plan, event, numbers.step, given, lifted, order, precision, chained)

    def _choose(self, plan: OpPlan, given: Arguments, numbers: AtenNumbers) -> Event | None:
        """Return the event of a call to compare; count the others. Filters apply first, then every n-th call is taken."""
        sampler = self._sampler
        if not sampler.takes_all and not self._narrow and not sampler.wants(plan, given.args, given.kwargs):
            numbers.count(plan.name)
            self.unsampled += 1
            return None
        event = numbers.event(plan.name)
        if event is None:
            self.filtered += 1
        elif not sampler.takes_all and self._narrow and not sampler.wants(plan, given.args, given.kwargs):
            self.unsampled += 1
            return None
        return event

    def precision_of(self, given: Arguments) -> str:
        """Return the precision of the reference for a call."""
        return self._precision

    def end(self, opened: _Open, result: Any) -> Any:
        """Compare the result of a call."""
        try:
            self._hand_over(opened, result)
        except TrainingStopped:
            raise
        except BaseException as error:
            self._take_back(opened, error)
        return result

    def _hand_over(self, opened: _Open, result: Any) -> None:
        func, plan, given, lifted = opened.func, opened.plan, opened.given, opened.lifted
        outputs = outputs_of(plan, given, result)
        for tensor in outputs.values():
            demand_numbers(tensor)
        device = _device_of(outputs, given)
        event = opened.event
        case = Case(
            func, plan, event.name, event.module, given, lifted, opened.precision, outputs, device == "cpu", device
        )
        if not self._workers:
            self._judge(case, opened)
            return
        copies = {slot: lift_tensor(tensor, {}, True) for slot, tensor in outputs.items()}
        case = case._replace(templates=given.templates(), results=copies)
        opened = opened._replace(given=case.templates)
        nbytes = lifted.nbytes + sum(tensor.nbytes for tensor in copies.values())
        with_grad = torch.is_grad_enabled()  # some kernels ask for it, e.g. the LSTM's

        def judge() -> None:
            with torch.set_grad_enabled(with_grad):
                self._judge(case, opened)

        self._workers.put(judge, nbytes)

    def raised(self, opened: _Open, error: BaseException) -> None:
        """Withdraw a call that raised."""
        self._take_back(opened, CannotLift(f"raised {type(error).__name__}"))

    def _judge(self, case: Case, opened: _Open) -> None:
        with torch_names.no_overrides(), torch_names.below_autograd(), torch_names.no_autocast():
            self._judge_alone(case, opened)

    def _judge_alone(self, case: Case, opened: _Open) -> None:
        stop: TrainingStopped | None = None
        try:
            rows = decide(case, self._measures)
            chained = None
            if self._chain is not None and opened.chained is not None:
                chained = self._chain.follow(case, opened.chained)
            self._found(case, opened.event, opened.step, opened.order, rows, chained)
        except TrainingStopped as asked:
            stop = asked
        except Exception as error:
            let_through(error)
            self._take_back(opened, error)
            return
        failing = [row for row in rows if not row.opinion.passes]
        with self._lock:
            count = self.ops.setdefault(case.plan.name, OpCount())
            count.compared += 1
            count.failed += bool(failing)
            count.worst = max([count.worst, *(row.figures["relative_l2"] for row in rows if row.opinion.passes)])
        if stop is not None and not self._workers:
            raise stop
        if stop is not None and not self._has_stopped:
            self.stop, self._has_stopped = stop, True
        if self._heal and failing:
            self._mend(case, failing)

    def _mend(self, case: Case, failing: list[Judged]) -> None:
        """Replace the device's numbers by the reference's."""
        for row in failing:
            if row.wide is not None:
                target = case.results[row.slot]
                target.copy_(row.wide.to(target.dtype))
                self.healed += 1
                if self._chain is not None:
                    self._chain.look_again(target)

    def _take_back(self, opened: _Open, error: BaseException) -> None:
        """Withdraw a call that cannot be compared: it has no reference, the tool failed on it, or it was interrupted."""
        with self._lock:
            self.compared -= 1
        interrupted = is_from_program(error)
        if interrupted:
            self._skip(INTERRUPTED, opened.plan.name)
        elif isinstance(error, (CannotLift, NoReference)):
            self._skip(str(error), opened.plan.name)
        else:
            self._break(opened.event.name, error)
        if self._chain is not None:
            self._chain.pass_by(opened.plan, opened.given)
        if interrupted:
            raise error

    def _skip(self, reason: str, op: str) -> None:
        with self._lock:
            self.skipped[reason, op] += 1

    def _break(self, where: str, error: BaseException) -> None:
        with self._lock:
            self.broken += 1
            if self.first_error is None:
                self.first_error = f"{where}: {type(error).__name__}: {error}"


def _device_of(outputs: Outputs, given: Arguments) -> str:
    """Return the device of a call: the first one that is not the CPU."""
    for tensor in outputs.values():
        if not tensor.is_cpu:
            return str(tensor.device)
    for _, tensor in given.tensors():
        if not tensor.is_cpu:
            return str(tensor.device)
    return "cpu"

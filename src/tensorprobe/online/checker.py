"""Does each ATen call a second time on the reference and judges it at once: what a probe asks before and after every call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tensorprobe.capture.session import Header
from tensorprobe.capture.sinks import Place
from tensorprobe.errors import TrainingStopped
from tensorprobe.model.online import OpCount
from tensorprobe.online.chain import Chain, Compared
from tensorprobe.online.lifting import Arguments, CannotLift, lift, lift_tensor
from tensorprobe.online.policies import Measures
from tensorprobe.online.reference import NoReference, below_autograd, no_autocast, outputs_of
from tensorprobe.online.sampling import Sampler
from tensorprobe.online.schema import OpPlan, plan_op
from tensorprobe.online.verdict import Case, Judged, decide
from tensorprobe.online.workers import Workers

Found = Callable[[Case, Header, int, list[Judged], "Compared | None"], None]
"""Told of every compared call: the case, where it was, its order, the rows, and what the chain says of it."""


class _Open(NamedTuple):
    func: Any
    plan: OpPlan
    header: Header
    given: Arguments
    lifted: Arguments
    order: int
    chained: Any


class Checker:
    """The second execution. `found` gets the rows of each call; it may raise TrainingStopped when there are no workers."""

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
        all_figures: bool = False,
    ) -> None:
        self._precision, self._measures, self._sampler, self._workers = precision, measures, sampler, workers
        self._libraries, self._found, self._chain, self._heal = libraries, found, chain, heal
        self._all_figures = all_figures
        self._plans: dict[Any, OpPlan] = {}
        self._lock = threading.Lock()
        self.seen = self.compared = self.filtered = self.unsampled = self.broken = self.healed = 0
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.ops: dict[str, OpCount] = {}
        self.first_error: str | None = None
        self.stop: TrainingStopped | None = None
        """Raised before the next call, in the thread of the training."""

    def begin(self, func: Any, args: Any, kwargs: Any, place: Place) -> _Open | None:
        """Lift the inputs of a call that is to be compared."""
        if self.stop is not None:
            raise self.stop
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = plan_op(func, self._libraries)
        self.seen += 1
        if plan.skip is not None:
            self._skip(plan.skip, plan.name)
            if self._chain is not None:
                self._chain.pass_by(plan, Arguments(args, kwargs))
            return None
        if not self._sampler.takes_all and not self._sampler.wants(plan, args, kwargs):
            place.count(plan.name)
            self.unsampled += 1
            return None
        header = place.header(plan.name)
        if header is None:
            self.filtered += 1
            return None
        given = Arguments(args, kwargs)
        try:
            with below_autograd(), no_autocast():
                lifted = lift(plan, given, self._precision, copies=bool(self._workers))
                chained = None if self._chain is None else self._chain.lift(plan, given)
        except CannotLift as reason:
            self._skip(str(reason), plan.name)
            return None
        except Exception as error:
            self._break(header.name, error)
            return None
        order, self.compared = self.compared, self.compared + 1
        return _Open(func, plan, header, given, lifted, order, chained)

    def end(self, opened: _Open, result: Any) -> Any:
        """Compare what came out."""
        func, plan, given, lifted = opened.func, opened.plan, opened.given, opened.lifted
        outputs = outputs_of(plan, given, result)
        alone = all(tensor.is_cpu for tensor in outputs.values()) and all(t.is_cpu for _, t in given.tensors())
        case = Case(
            func, plan, opened.header.name, opened.header.module, given, lifted, self._precision, outputs, alone
        )
        if not self._workers:
            with below_autograd(), no_autocast():
                self._judge(case, opened)
            return result
        with below_autograd(), no_autocast():
            copies = {slot: lift_tensor(tensor, {}, True) for slot, tensor in outputs.items()}
        case = case._replace(templates=given.templates(), results=copies)
        opened = opened._replace(given=case.templates)
        nbytes = lifted.nbytes + sum(tensor.nbytes for tensor in copies.values())
        self._workers.put(lambda: self._judge(case, opened), nbytes)
        return result

    def raised(self, opened: _Open, error: BaseException) -> None:
        """A call that raised has no result: it is taken back."""
        self.compared -= 1
        self._skip(f"raised {type(error).__name__}", opened.plan.name)

    def _judge(self, case: Case, opened: _Open) -> None:
        name = case.plan.name
        try:
            rows = decide(case, self._measures, all_figures=self._all_figures)
            chained = None
            if self._chain is not None and opened.chained is not None:
                chained = self._chain.follow(case, opened.chained)
            failing = [row for row in rows if not row.opinion.passes]
            with self._lock:
                count = self.ops.setdefault(name, OpCount())
                count.compared += 1
                count.failed += bool(failing)
                count.worst = max([count.worst, *(row.figures["relative_l2"] for row in rows if row.opinion.passes)])
            if self._heal and failing:
                self._mend(case, failing)
            self._found(case, opened.header, opened.order, rows, chained)
        except NoReference as reason:
            with self._lock:
                self.compared -= 1
            self._skip(str(reason), name)
        except TrainingStopped as stop:
            if not self._workers:
                raise
            self.stop = stop
        except Exception as error:
            with self._lock:
                self.compared -= 1
            self._break(case.call, error)

    def _mend(self, case: Case, failing: list[Judged]) -> None:
        """Put the reference's numbers in the place of the device's."""
        for row in failing:
            if row.wide is not None:
                target = case.results[row.slot]
                target.copy_(row.wide.to(target.dtype))
                self.healed += 1

    def _skip(self, reason: str, op: str) -> None:
        with self._lock:
            self.skipped[reason, op] += 1

    def _break(self, where: str, error: BaseException) -> None:
        with self._lock:
            self.broken += 1
            if self.first_error is None:
                self.first_error = f"{where}: {type(error).__name__}: {error}"

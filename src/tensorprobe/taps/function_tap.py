"""The API level: a TorchFunctionMode that sees every call of a torch function, method or operator, whatever name it was imported by.

How a call is handled depends on what the sink needs. `Describing` makes an event of it; `Looking` (looking.py) only shows
it to the sink.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Protocol

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_arguments, flatten_result
from tensorprobe.fast import fast
from tensorprobe.model import Level
from tensorprobe.model.interrupts import is_from_program
from tensorprobe.taps.alone import AloneRun
from tensorprobe.taps.backward import edges_of
from tensorprobe.taps.collectives import Collectives
from tensorprobe.taps.operators import LINEAR_ALGEBRA, OPERATORS, WITH_INDICES, as_given, is_held, spell_operator
from tensorprobe.taps.override_free import PLAIN_FUNCTIONS, is_overridden, opened_function, original_of
from tensorprobe.taps.plans import NOT_AN_OP, OUT, UNINITIALISED, WRITTEN_ONLY, FunctionPlan, plan_function
from tensorprobe.taps.quick import recording_in_c
from tensorprobe.taps.session import OpenCall, Session
from tensorprobe.taps.sites import call_at, placed
from tensorprobe.taps.thread_state import ThreadState

_is_compiling, _is_tracing = torch_names.is_compiling, torch_names.is_tracing
version_of = torch_names.version_of

_CHECKPOINT = str(checkpoint.__file__)
"""Before torch 2.13 activation checkpointing makes empty tensors for itself."""

Plans = dict[Any, FunctionPlan]
RunVisibly = Callable[[Callable[..., Any], Any, Any], Any]
"""Calls a function so that the mode sees what happens inside it."""


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **(kwargs or {}))


class Handling(Protocol):
    """Handles the calls that a function tap sees."""

    def run(self, func: Any, plan: FunctionPlan, state: ThreadState, args: Any, kwargs: Any) -> Any:
        """Execute a call and return its result."""

    def idle(self) -> None:
        """A backward has ended."""


class FunctionTap(TorchFunctionMode):
    """Watches the calls of one thread, below all other modes: it sees what is really executed."""

    def __init__(self, session: Session, plans: Plans, handling: Handling) -> None:
        super().__init__()
        self._session = session
        self._plans = plans
        self._run = handling.run
        self._idle = handling.idle
        self._names_operators = session.sink.needs.rules.operators
        self._only_given = session.sink.needs.rules.only_given
        self._only = session.sink.needs.rules.only or frozenset()
        self._by_caller: dict[Any, FunctionPlan] = {}  # apart: torch.compile guards the keys of `plans`
        self._spelled: dict[str, FunctionPlan] = {}
        self.run_visibly: RunVisibly = _run
        self.left_behind: Callable[[], None] = lambda: None
        describes = isinstance(handling, Describing) and handling.is_plain
        of_ours = not (self._names_operators or self._only)
        self.quick = (
            plans, NOT_AN_OP, session, handling if describes and of_ours else None, _is_compiling, _is_tracing,
            recording_in_c(session, plans) if describes and of_ours else None,
        )  # fmt: skip
        """For C: see `_fast_mode.h`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_compiling():  # first: torch.compile cannot trace the look-up of a higher-order operator
            return func(*args) if kwargs is None else func(*args, **kwargs)
        try:
            plan = self._plans.get(func)
        except TypeError:  # an object of the program that cannot be hashed
            plan = NOT_AN_OP
        if plan is NOT_AN_OP:
            return call_at(sys._getframe(1), func, args, kwargs)
        session = self._session
        state = session.state
        if state.busy or not session.recording:
            result = call_at(sys._getframe(1), func, args, kwargs)
            if session.ended:
                self.left_behind()
            return result
        if plan is None or (plan.code is not None and plan.code is not sys._getframe(2).f_code):
            plan = self._plan_of(func, sys._getframe(1))
        if plan.original is not None:
            func = plan.original
        if not plan.name:
            return self._run_engine(func, plan, args, kwargs)
        if _is_tracing():
            session.pass_by_tracing()
            return call_at(sys._getframe(1), func, args, kwargs)
        if plan.allocates and sys._getframe(1).f_code.co_filename == _CHECKPOINT:
            return _unseen(state, func, args, kwargs)
        if self._names_operators and (
            plan.name in OPERATORS or plan.name.startswith(LINEAR_ALGEBRA) or plan.name.endswith(WITH_INDICES)
        ):
            plan = self._respelled(plan, spell_operator(plan.name, sys._getframe(1), args))
        if self._only and plan.code is not None and plan.name.startswith("Functional.") and is_held(sys._getframe(1)):
            opened = opened_function(func)
            if opened is not None and not is_overridden(args, kwargs or {}):
                return self.run_visibly(opened, args, kwargs)
        if kwargs and plan.code is not None:
            args, kwargs = as_given(func, args, kwargs, sys._getframe(1), only_given=self._only_given)
        try:
            return self._run(func, plan, state, args, kwargs)
        except BaseException:
            state.busy = False
            raise

    def _run_engine(self, func: Any, plan: FunctionPlan, args: Any, kwargs: Any) -> Any:
        """Run a backward with this mode on inside it. Classes that override `backward` get the call as they would without us."""
        if plan.body is None:
            return call_at(sys._getframe(2), func, args, kwargs)
        if is_overridden(args, kwargs or {}):
            self._session.blind_spots["backward of a tensor subclass: API calls inside are not seen"] += 1
            result = call_at(sys._getframe(2), func, args, kwargs)
        else:
            result = self.run_visibly(placed(sys._getframe(2), plan.body), args, kwargs)
        if self._session.training is not None:
            self._session.training.backward_ended()
        self._idle()
        return result

    def _plan_of(self, func: Any, caller: FrameType) -> FunctionPlan:
        code = None if caller.f_back is None else caller.f_back.f_code
        plan = self._by_caller.get((func, code))
        if plan is None:
            plan = self._make_plan(func, caller)
            if plan.code is not None:
                plan = self._by_caller[func, code] = msgspec.structs.replace(plan, code=code)
            if isinstance(func, PLAIN_FUNCTIONS):  # torch.compile hashes every key of `plans`
                self._plans.setdefault(func, plan)
        return plan

    def _make_plan(self, func: Any, caller: FrameType) -> FunctionPlan:
        try:
            original = original_of(func, caller)
            plan = plan_function(original, self._only)
            return plan if original is func else msgspec.structs.replace(plan, original=original, is_plain=False)
        except Exception as error:
            self._session.tool_failed(getattr(func, "__name__", type(func).__name__), error)
            return NOT_AN_OP

    def _respelled(self, plan: FunctionPlan, name: str) -> FunctionPlan:
        """Return the plan of an operator under the name that Python has for it."""
        found = self._spelled.get(name)
        if found is None:
            found = self._spelled[name] = msgspec.structs.replace(plan, name=name)
        return found


function_tap_type: type[FunctionTap] = FunctionTap if fast is None else fast.mode_type(FunctionTap)
"""The class to use: the one with its handler in C, if that was built."""


class Describing:
    """Makes an event of every call, with its tensors and its backward.

    Without `record` calls are only counted and named, for the ATen calls made in them. `alone` handles one call that is
    bracketed or run once more.
    """

    def __init__(
        self,
        session: Session,
        plans: Plans,
        collectives: Collectives,
        *,
        record: bool = True,
        alone: AloneRun | None = None,
    ) -> None:
        self._session = session
        self._plans = plans
        self._collectives = collectives
        self._record = record
        self._inner = session.sink.needs.rules.inner
        self._skip = session.sink.skip if record and not session.sink.needs.look else None
        self._alone = alone
        self.is_plain = record and alone is None
        """Whether a plain call is executed between `_before` and `_finish`, and nothing else."""
        self.run_visibly: RunVisibly = _run

    def idle(self) -> None:
        """Do nothing when a backward is over."""

    def run(self, func: Any, plan: FunctionPlan, state: ThreadState, args: Any, kwargs: Any) -> Any:
        """Execute a call between `_before` and `_after`."""
        call = self._before(state, plan, args, kwargs or {})
        if call is None:
            return self._open(func, plan, args, kwargs)
        try:
            if self._alone is not None and self._alone.is_due(call.event.name):
                result = self._run_alone_too(self._alone, func, plan, call, args, kwargs or {})
            elif not self._record or plan.has_parts or (plan.body is not None and self._inner):
                result = self._inside(func, plan, call, args, kwargs)
            else:
                result = call_at(sys._getframe(2), func, args, kwargs)
        except BaseException as error:
            self._raised(call, error)
            raise
        self._finish(state, func, plan, call, result, args, kwargs or {})
        return result

    def _finish(
        self, state: ThreadState, func: Any, plan: FunctionPlan, call: OpenCall, result: Any, args: Any, kwargs: Any
    ) -> None:
        try:
            self._after(state, func, plan, call, result, args, kwargs)
        except BaseException:  # raised by the program into our code: the call was made, and belongs in the record
            if not self._session.is_handed_over(call.event):
                self._after(state, func, plan, call, result, args, kwargs)
            raise

    def _open(self, func: Any, plan: FunctionPlan, args: Any, kwargs: Any) -> Any:
        """Run a function that is not recorded. The calls inside it may be, if the function itself is just not selected."""
        if plan.code is not None and not self._session.selection.records(plan.name):
            opened = opened_function(func)
            if opened is not None and not is_overridden(args, kwargs or {}):
                return self.run_visibly(opened, args, kwargs)
        return call_at(sys._getframe(3), func, args, kwargs)

    def _inside(self, func: Any, plan: FunctionPlan, call: OpenCall, args: Any, kwargs: Any) -> Any:
        """Run a function whose inner calls are recorded too, as parts of it."""
        state = self._session.state
        calls, outer = state.calls, state.call_stack
        depth = len(calls)
        try:
            calls.append(call.event.name)
            state.call_stack = call.event.stack
            if plan.body is not None and not is_overridden(args, kwargs or {}):
                return self.run_visibly(plan.body, args, kwargs)
            return call_at(sys._getframe(3), func, args, kwargs)
        finally:
            del calls[depth:]
            state.call_stack = outer

    def _run_alone_too(
        self, alone: AloneRun, func: Any, plan: FunctionPlan, call: OpenCall, args: Any, kwargs: Any
    ) -> Any:
        true_call = partial(self._inside, func, plan, call, args, kwargs)
        result, again = alone.run(true_call, call, func, args, kwargs)
        if again:
            call.start = -1  # the second run's backward stands for it: ATen calls of the true one belong to no call
        return result

    def _before(self, state: ThreadState, plan: FunctionPlan, args: Any, kwargs: Any) -> OpenCall | None:
        """Number the call and take its inputs. Return None if it is not to be followed further."""
        session = self._session
        name = plan.name
        call = None
        guard = torch_names.no_overrides()
        try:
            state.busy = True
            with guard:
                if self._skip is not None and self._skip(plan, args):
                    session.number(name, session.repetition())
                    session.filter_out()
                    return None
                call = session.begin_call(name, Level.API) if self._record else session.enclosing_call(name)
                if call is None:
                    return None
                event = call.event
                event.args, event.kwargs = flatten_arguments(args, kwargs, call.inputs)
                if call.wanted.forward and session.selection.inputs and self._record:
                    but = plan.receives or (OUT if "out" in kwargs else ())
                    event.slots = session.take(call.inputs, but=but, reason=WRITTEN_ONLY)
                if plan.mutates and not plan.returns_changed:
                    call.versions = [version_of(tensor) for _, tensor in call.inputs]
                if torch.is_grad_enabled():
                    call.edges = edges_of(call.inputs)
                    call.start = torch_names.sequence_number()
                return call
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            if is_from_program(error) and call is not None:
                session.cancel(name, call.event)
            session.tool_failed(name, error)
            return None
        finally:
            state.busy = False

    def _after(
        self, state: ThreadState, func: Any, plan: FunctionPlan, call: OpenCall, result: Any, args: Any, kwargs: Any
    ) -> None:
        """Take the outputs, hand the call over, and follow its gradients."""
        session = self._session
        guard = torch_names.no_overrides()
        try:
            state.busy = True
            with guard:
                outputs: Tensors = []
                flatten_result(result, outputs)
                if not plan.distributed:  # what a collective gives is in its arguments
                    session.note_result(call, result)
                if plan.mutates and not plan.returns_changed:
                    outputs += self._changed(plan, call, outputs)
                if not outputs and not (plan.answers and isinstance(result, bool)):
                    self._learn(func, plan, call, result)
                    return
                if (plan.allocates or plan.workspace) and self._record:
                    session.unwritten.allocated(outputs, plan.workspace)
                elif self._record and session.unwritten.blocks and not self._collectives.is_pending(result):
                    out = plan.receives or (OUT if "out" in kwargs else ())
                    session.unwritten.follow(
                        plan.name, func, args, kwargs, inputs=call.inputs, outputs=outputs, out=out
                    )
                if plan.distributed and self._collectives.is_pending(result):
                    self._collectives.later(result, call, outputs)
                    return
                self._collectives.returned(call.event.name)
                if call.wanted.forward and self._record:
                    if self._collectives.keep(plan.name, call.event, call.inputs, outputs):
                        return
                    if session.selection.outputs:
                        but = ("output",) if plan.allocates else ()
                        call.event.slots += session.take(outputs, but=but, reason=UNINITIALISED)
                    session.emit(call.event)
                elif self._record:
                    session.filter_out()
                if call.start >= 0 and (call.edges or plan.mutates):
                    follow = session.watch_backward if self._record else session.mark_nodes
                    follow(call, outputs)
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            session.tool_failed(call.event.name, error)
        finally:
            state.busy = False

    def _changed(self, plan: FunctionPlan, call: OpenCall, outputs: Tensors) -> Tensors:
        """Return the arguments that the call has changed, as outputs. A collective leaves the version numbers alone."""
        returned = {id(tensor) for _, tensor in outputs}
        prefix = "output.changed" if outputs else "output"
        changed = []
        for (slot, tensor), version in zip(call.inputs, call.versions, strict=True):
            unseen = plan.distributed or slot in plan.writes or slot.rpartition(".")[0] + "." in plan.writes
            if (unseen or version_of(tensor) != version) and id(tensor) not in returned:
                changed.append((f"{prefix}{slot[5:]}", tensor))
        return changed

    def _learn(self, func: Any, plan: FunctionPlan, call: OpenCall, result: Any) -> None:
        """Treat further calls of this function as queries, unless it may also change arguments, or return tensors next time."""
        self._session.sink.drop(call.event.slots)
        if type(result) in (tuple, list) and not result:
            self._session.filter_out()
        elif not plan.mutates:
            self._plans[func] = NOT_AN_OP

    def _raised(self, call: OpenCall, error: BaseException) -> None:
        """Record an op that raised, with its inputs. A recomputation that stops early raises by design and is left out."""
        session = self._session
        guard = torch_names.no_overrides()
        try:
            session.state.busy = True
            with guard:
                if not self._record:
                    return
                if type(error).__name__ == "_StopRecomputationError" or not call.wanted.forward:
                    session.discard(call.event)
                else:
                    call.event.raised = type(error).__name__
                    session.emit(call.event)
        except BaseException as problem:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            session.tool_failed(call.event.name, problem)
        finally:
            session.state.busy = False


def _unseen(state: ThreadState, func: Any, args: Any, kwargs: Any) -> Any:
    """Execute a call that torch makes for its own purposes."""
    state.busy = True
    try:
        return call_at(sys._getframe(2), func, args, kwargs)
    finally:
        state.busy = False

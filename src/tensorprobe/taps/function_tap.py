"""The API level: a TorchFunctionMode that sees every call of a torch function, method or operator, by whatever name it was imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_arguments, flatten_result
from tensorprobe.model import Level
from tensorprobe.taps.alone import AloneRun
from tensorprobe.taps.backward import edges_of
from tensorprobe.taps.collectives import Collectives
from tensorprobe.taps.operators import OPERATORS, spell_operator
from tensorprobe.taps.override_free import COMPOSITES, ENGINES
from tensorprobe.taps.plans import ENGINE, NOT_AN_OP, OUT, UNINITIALISED, WRITTEN_ONLY, Plan, plan_function
from tensorprobe.taps.session import Header, Session, ThreadState

_is_compiling, _is_tracing = torch_names.is_compiling, torch_names.is_tracing


class FunctionTap(TorchFunctionMode):
    """Watches one thread's calls for a session. Pushed below all other modes, so that it sees what is really executed.

    Calls that are not recorded (`record` false) are counted and named, for the ATen calls made in them. `alone` is for one
    call that is to be bracketed, or run once more.
    """

    def __init__(
        self, session: Session, collectives: Collectives, *, record: bool, alone: AloneRun | None = None
    ) -> None:
        super().__init__()
        self._session = session
        self._collectives = collectives
        self._record = record
        self._alone = alone
        self._plans: dict[Any, Plan] = {}
        self.names_operators = False
        """Whether `x + y` is `Tensor.__add__`, as Python has it, and not `Tensor.add`."""
        self.visible_inside: Callable[[dict[str, Any]], AbstractContextManager[None]] = lambda _: self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = self._make_plan(func)
        session = self._session
        state = session.state
        if state.busy or not session.recording:
            return func(*args, **kwargs)
        if plan.name is None:
            if plan is not ENGINE:
                return func(*args, **kwargs)
            with self.visible_inside(kwargs):
                return ENGINES[func](*args, **kwargs)
        if _is_tracing():
            session.pass_by_tracing()
            return func(*args, **kwargs)
        if self.names_operators and plan.name in OPERATORS:
            plan = plan._replace(name=spell_operator(plan.name, sys._getframe(1)))
        call = self._before(state, plan, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        try:
            if self._alone is not None and self._alone.is_due(call.header):
                result = self._run_alone_too(self._alone, func, call, args, kwargs)
            elif plan.is_leaf and self._record:
                result = func(*args, **kwargs)
            else:
                result = self._inside(func, call, args, kwargs)
        except BaseException as error:
            self._raised(call, error)
            raise
        self._after(state, func, plan, call, result)
        return result

    def _make_plan(self, func: Any) -> Plan:
        try:
            return plan_function(func)
        except Exception as error:
            self._session.tool_failed(getattr(func, "__name__", type(func).__name__), error)
            return NOT_AN_OP

    def _inside(self, func: Any, call: _OpenCall, args: Any, kwargs: Any) -> Any:
        """Run a function whose parts are recorded too, as calls that belong to it."""
        state = self._session.state
        calls, outer = state.calls, state.call_stack
        calls.append(call.header.name)
        state.call_stack = call.header.stack
        composite = COMPOSITES.get(func)
        try:
            if composite is None:
                return func(*args, **kwargs)
            with self.visible_inside(kwargs):
                return composite(*args, **kwargs)
        finally:
            calls.pop()
            state.call_stack = outer

    def _run_alone_too(self, alone: AloneRun, func: Any, call: _OpenCall, args: Any, kwargs: Any) -> Any:
        true_call = partial(self._inside, func, call, args, kwargs)
        result, again = alone.run(true_call, call.header, func, args, kwargs)
        if again:
            call.start = -1  # what its true backward does is not asked for: its nodes bear no name
        return result

    def _before(self, state: ThreadState, plan: Plan, args: Any, kwargs: Any) -> _OpenCall | None:
        """Count the call and copy its inputs; None when nothing more is to be done about it."""
        session = self._session
        state.busy = True
        try:
            with torch_names.no_overrides():
                header = (
                    session.header(plan.name or "", Level.API) if self._record else session.attribution(plan.name or "")
                )
                if header is None:
                    return None
                call = _OpenCall(header)
                call.tree = flatten_arguments(args, kwargs, call.inputs)
                if header.wanted.forward and session.selection.inputs and self._record:
                    but = plan.receives or (OUT if "out" in kwargs else ())
                    call.slots = session.snapshots.take(call.inputs, but=but, reason=WRITTEN_ONLY)
                if plan.mutates and not plan.returns_changed:
                    call.versions = [_version(tensor) for _, tensor in call.inputs]
                if torch.is_grad_enabled():
                    call.edges = edges_of(call.inputs)
                    call.start = torch_names.sequence_number()
                return call
        except Exception as error:
            session.tool_failed(plan.name or "", error)
            return None
        finally:
            state.busy = False

    def _after(self, state: ThreadState, func: Any, plan: Plan, call: _OpenCall, result: Any) -> None:
        """Copy the outputs, hand the call over, and follow its gradients."""
        session = self._session
        state.busy = True
        try:
            with torch_names.no_overrides():
                outputs: Tensors = []
                flatten_result(result, outputs)
                if plan.mutates and not plan.returns_changed:
                    outputs += self._changed(plan, call, outputs)
                if not outputs:
                    self._learn(func, plan, call)
                    return
                if plan.distributed and self._collectives.is_pending(result):
                    self._collectives.later(result, call.header, call.slots, call.tree, outputs)
                    return
                if call.header.wanted.forward and self._record:
                    if session.selection.outputs:
                        but = ("output",) if plan.allocates else ()
                        call.slots += session.snapshots.take(outputs, but=but, reason=UNINITIALISED)
                    session.emit(call.header, call.slots, args=call.tree[0], kwargs=call.tree[1])
                elif self._record:
                    session.filter_out()
                if call.start >= 0 and (call.edges or plan.mutates):
                    follow = session.watch_backward if self._record else session.mark_nodes
                    follow(call.header, call.edges, outputs, call.start)
        except Exception as error:
            session.tool_failed(call.header.name, error)
        finally:
            state.busy = False

    def _changed(self, plan: Plan, call: _OpenCall, outputs: Tensors) -> Tensors:
        """The arguments that the call has changed are outputs too. A collective changes them without saying so."""
        returned = {id(tensor) for _, tensor in outputs}
        prefix = "output.changed" if outputs else "output"
        changed = []
        for (slot, tensor), version in zip(call.inputs, call.versions, strict=True):
            unseen = plan.distributed or slot in plan.writes or slot.rpartition(".")[0] + "." in plan.writes
            if (unseen or _version(tensor) != version) and id(tensor) not in returned:
                changed.append((f"{prefix}{slot[5:]}", tensor))
        return changed

    def _learn(self, func: Any, plan: Plan, call: _OpenCall) -> None:
        """The call was a question, not an operation. So will the next ones be, unless the function may also change arguments."""
        self._session.forget(call.slots)
        if not plan.mutates:
            self._plans[func] = NOT_AN_OP

    def _raised(self, call: _OpenCall, error: BaseException) -> None:
        """An op that raised is recorded with its inputs; a recomputation that stops early raises by design and is not."""
        session = self._session
        session.state.busy = True
        try:
            with torch_names.no_overrides():
                if not self._record:
                    return
                if type(error).__name__ == "_StopRecomputationError" or not call.header.wanted.forward:
                    session.discard(call.slots)
                else:
                    session.emit(
                        call.header, call.slots, args=call.tree[0], kwargs=call.tree[1], raised=type(error).__name__
                    )
        except Exception as problem:
            session.tool_failed(call.header.name, problem)
        finally:
            session.state.busy = False


class _OpenCall:
    """A call between its beginning and its end."""

    __slots__ = ("edges", "header", "inputs", "slots", "start", "tree", "versions")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.inputs: Tensors = []
        self.slots: list[Any] = []
        self.tree: tuple[Any, Any] = (None, None)
        self.versions: list[int] = []
        self.edges: dict[Any, str] = {}
        self.start = -1


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

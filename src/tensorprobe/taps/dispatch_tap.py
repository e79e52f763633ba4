"""The ATen level: a TorchDispatchMode that sees each operator as it is executed, in forward and in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_arguments, flatten_result
from tensorprobe.errors import TrainingStopped
from tensorprobe.model.event import Event
from tensorprobe.model.interrupts import is_from_program
from tensorprobe.model.sink import SecondSink
from tensorprobe.taps.collectives import Collectives
from tensorprobe.taps.plans import UNINITIALISED, WRITTEN_ONLY, AtenPlan, plan_aten
from tensorprobe.taps.session import NODE_KEY, Origin, Session

_PLAIN = torch_names.PLAIN_CLASSES
_PLAIN_VALUES = _PLAIN | {
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_SHOWN_TWICE = None if torch_names.DETACHES_ONCE else torch.ops.aten.detach.default
"""An op that torch shows twice for one call: the second time with what it has just returned."""


def _execute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op. Hide it from classes that override only API calls: without us they would not see it either."""
    return _execute_with_classes(func, args, kwargs) if _have_classes(args, kwargs) else func(*args, **kwargs)


def _execute_with_classes(func: Any, args: Any, kwargs: Any) -> Any:
    if func.namespace != "aten":
        return func(*args, **kwargs)
    with torch_names.no_overrides_of_classes():
        return func(*args, **kwargs)


def _have_classes(args: Any, kwargs: Any) -> bool:
    return _holds_classes(args) or (bool(kwargs) and _holds_classes(kwargs.values()))


def _holds_classes(values: Collection[Any]) -> bool:
    """Return whether there are tensors of classes that override only API calls. Dispatch modes do not see these classes."""
    if _PLAIN_VALUES.issuperset(map(type, values)):
        return False
    return any(
        _holds_classes(value) if type(value) in (list, tuple) else _overrides_api_only(value) for value in values
    )


def _overrides_api_only(value: Any) -> bool:
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _without_classes(value: Any) -> Any:
    """Return the values with plain tensors, on the same memory, in place of those of classes that override API calls."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(map(_without_classes, value))
    if kind is dict:
        return {name: _without_classes(each) for name, each in value.items()}
    return torch_names.methods_of_tensor.as_subclass(value, torch.Tensor) if _overrides_api_only(value) else value


class DispatchTap(torch_names.DispatchMode):
    """Makes an event of each ATen call; or asks the sink before and after each, if it needs a second execution."""

    supports_higher_order_operators = True

    def __init__(self, session: Session, collectives: Collectives) -> None:
        super().__init__()
        self._session = session
        self._collectives = collectives
        self._plans: dict[Any, AtenPlan] = {}
        sink = session.sink
        self._second = cast(SecondSink, sink) if sink.needs.second else None
        self._skip = sink.skip
        self.left_behind: Callable[[], None] = lambda: None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile need not give up because this mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self._session
        if type(func) is not torch_names.OpOverload and isinstance(func, torch_names.HigherOrderOperator):
            session.blind_spots["higher-order operator: ATen calls inside are not seen"] += 1
            return func(*args, **kwargs)
        if not session.recording or session.state.busy or torch_names.is_compiling():
            return self._unseen(func, args, kwargs)
        if torch_names.is_tracing():
            session.pass_by_tracing()
            return _execute(func, args, kwargs)
        if session.state.detaches:
            session.state.detaches = False
            if func is torch.ops.aten.detach.default:
                return _execute(func, args, kwargs)
        if self._second is not None:
            return self._run_asking(self._second, func, types, args, kwargs)
        plan = self._plan_of(func)
        if plan.name is None or (func is _SHOWN_TWICE and session.state.is_detached(args)):
            return _execute(func, args, kwargs)
        try:
            result = self._run(plan.name, plan, func, args, kwargs)
            if func is _SHOWN_TWICE:
                session.state.detached = weakref.ref(result)
            return result
        except BaseException:
            session.state.busy = False
            raise

    def _run(self, name: str, plan: AtenPlan, func: Any, args: Any, kwargs: Any) -> Any:
        opened = self._before(name, plan, func, args, kwargs)
        if opened is None:
            return _execute(func, args, kwargs)
        event, inputs = opened
        try:
            result = _execute(func, args, kwargs)
        except BaseException as error:
            self._after(plan, event, [], None, lambda: None, raised=type(error).__name__)
            raise
        follow = partial(self._follow, func, plan, inputs, args, kwargs, result)
        try:
            self._after(plan, event, inputs, result, follow)
        except BaseException:  # raised by the program into our code: the call was made, and belongs in the record
            if not self._session.is_handed_over(event):
                self._after(plan, event, inputs, result, follow)
            raise
        return result

    def _unseen(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = _execute(func, args, kwargs)
        if self._session.ended:
            self.left_behind()
        return result

    def _plan_of(self, func: Any) -> AtenPlan:
        plan = self._plans.get(func)
        if plan is None:
            try:
                plan = plan_aten(func)
            except Exception as error:
                self._session.tool_failed(str(func), error)
                plan = AtenPlan(None)
            self._plans[func] = plan
        return plan

    def _skips(self, func: Any, args: Any) -> bool:
        """Return whether the sink skips this call. It is numbered in any case."""
        if self._skip is None:
            return False
        plan = self._plan_of(func)
        if plan.name is None or not self._skip(plan, args):
            return False
        self.count(plan.name)
        self._session.filter_out()
        return True

    def _before(self, name: str, plan: AtenPlan, func: Any, args: Any, kwargs: Any) -> tuple[Event, Tensors] | None:
        session = self._session
        event = None
        guard = torch_names.no_overrides()
        try:
            session.state.busy = True
            with guard:
                event = None if self._skips(func, args) else self.event(name)
                if event is None:
                    return None
                inputs: Tensors = []
                event.args, event.kwargs = flatten_arguments(args, kwargs, inputs)
                if session.selection.inputs:
                    event.slots = session.take(inputs, but=plan.receives, reason=WRITTEN_ONLY)
                return event, inputs
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            if is_from_program(error) and event is not None:
                session.cancel(f"{name}:{event.name.rpartition('.')[2]}", event)
            session.tool_failed(name, error)
            return None
        finally:
            session.state.busy = False

    def _follow(self, func: Any, plan: AtenPlan, inputs: Tensors, args: Any, kwargs: Any, result: Any) -> None:
        """Keep track of uninitialised memory."""
        unwritten = self._session.unwritten
        if not (plan.allocates or plan.workspace or unwritten.blocks):
            return
        outputs: Tensors = []
        flatten_result(result, outputs)
        if plan.allocates or plan.workspace:
            unwritten.allocated(outputs, plan.workspace)
        else:
            unwritten.follow(str(plan.name), func, args, kwargs, inputs=inputs, outputs=outputs, out=plan.receives)

    def _after(
        self,
        plan: AtenPlan,
        event: Event,
        inputs: Tensors,
        result: Any,
        follow: Callable[[], None],
        raised: str | None = None,
    ) -> None:
        session = self._session
        guard = torch_names.no_overrides()
        try:
            session.state.busy = True
            with guard:
                if raised == "_StopRecomputationError":
                    session.discard(event)
                    return
                follow()
                outputs: Tensors = []
                if plan.written:
                    outputs = [(f"output{slot[5:]}", t) for slot, t in inputs if slot.startswith(plan.written)]
                else:
                    flatten_result(result, outputs)
                event.raised = raised
                if raised is None and self._collectives.keep(str(plan.name), event, inputs, outputs):
                    return
                if session.selection.outputs:
                    but = ("output",) if plan.allocates else ()
                    event.slots += session.take(outputs, but=but, reason=UNINITIALISED)
                session.emit(event)
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            session.tool_failed(event.name, error)
        finally:
            session.state.busy = False

    def _run_asking(self, sink: SecondSink, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call between the sink's `begin` and `end`."""
        session = self._session
        state = session.state
        if types and not _PLAIN.issuperset(types):
            if any(map(torch_names.is_wrapper_class, types)):
                return NotImplemented  # it dispatches itself, and the calls it makes come here again
            return _execute(func, args, kwargs)
        classes = _have_classes(args, kwargs)
        state.busy = True
        opened = None
        try:
            with torch_names.no_overrides(), torch_names.quiet():
                if not self._skips(func, args):
                    shown = (_without_classes(args), _without_classes(kwargs)) if classes else (args, kwargs)
                    opened = sink.begin(func, *shown, self)
        except TrainingStopped:
            raise
        except Exception as error:
            session.tool_failed(str(func), error)
        finally:
            state.busy = False
        if opened is None:
            return _execute_with_classes(func, args, kwargs) if classes else func(*args, **kwargs)
        try:
            result = _execute_with_classes(func, args, kwargs) if classes else func(*args, **kwargs)
        except BaseException as error:
            self._report_raised(sink, func, opened, error)
            raise
        state.busy = True
        try:
            with torch_names.no_overrides(), torch_names.quiet():
                plain = _without_classes(result)
                goes_on = sink.end(opened, plain)
                return result if goes_on is plain else goes_on
        except TrainingStopped:
            raise
        except Exception as error:
            session.tool_failed(str(func), error)
            return result
        finally:
            state.busy = False

    def _report_raised(self, sink: SecondSink, func: Any, opened: Any, error: BaseException) -> None:
        state = self._session.state
        state.busy = True
        try:
            with torch_names.no_overrides(), torch_names.quiet():
                sink.raised(opened, error)
        except Exception as problem:  # the user's own exception is what matters
            self._session.tool_failed(str(func), problem)
        finally:
            state.busy = False

    @property
    def step(self) -> int:
        """The current step."""
        return self._session.step

    def count(self, op: str) -> None:
        """Number a call that is not recorded."""
        self._session.count_aten(op, backward=self._in_backward())

    def event(self, op: str) -> Event | None:
        """Number and describe a call; None when it is not wanted."""
        in_backward = self._in_backward()
        origin = _origin_of_backward() if in_backward else None
        return self._session.aten_event(op, backward=in_backward, origin=origin)

    def _in_backward(self) -> bool:
        return torch_names.graph_task() != -1 and self._session.repetition() is None


def _origin_of_backward() -> Origin | None:
    """Return the API call and module whose backward is running, as the forward stored them in the node."""
    node = torch_names.autograd_node()
    return None if node is None else node.metadata.get(NODE_KEY)

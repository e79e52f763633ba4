"""The ATen level: a TorchDispatchMode that sees each operator as it is executed, in forward and in backward."""

from __future__ import annotations

from typing import Any

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_arguments, flatten_result
from tensorprobe.taps.plans import UNINITIALISED, WRITTEN_ONLY, AtenPlan, plan_aten
from tensorprobe.taps.session import NODE_KEY, Header, Origin, Session


class DispatchTap(torch_names.DispatchMode):
    """Records ATen calls for a session."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._plans: dict[Any, AtenPlan] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions pass through: torch.compile need not give up because this mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self._session
        if not session.recording or session.state.busy or torch_names.is_compiling():
            return func(*args, **kwargs)
        if torch_names.is_tracing():
            session.pass_by_tracing()
            return func(*args, **kwargs)
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = self._make_plan(func)
        if plan.name is None:
            return func(*args, **kwargs)
        opened = self._before(plan, args, kwargs)
        if opened is None:
            return func(*args, **kwargs)
        header, slots, inputs, tree = opened
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._after(plan, header, slots, tree, [], None, raised=type(error).__name__)
            raise
        self._after(plan, header, slots, tree, inputs, result)
        return result

    def _make_plan(self, func: Any) -> AtenPlan:
        try:
            return plan_aten(func)
        except Exception as error:
            self._session.tool_failed(str(func), error)
            return AtenPlan(None)

    def _before(
        self, plan: AtenPlan, args: Any, kwargs: Any
    ) -> tuple[Header, list[Any], Tensors, tuple[Any, Any]] | None:
        session = self._session
        session.state.busy = True
        name = plan.name or ""
        try:
            with torch_names.no_overrides():
                in_backward = torch_names.graph_task() != -1 and session.repetition() is None
                header = session.aten_header(
                    name, backward=in_backward, origin=origin_of_backward() if in_backward else None
                )
                if header is None:
                    return None
                inputs: Tensors = []
                tree = flatten_arguments(args, kwargs, inputs)
                slots: list[Any] = []
                if session.selection.inputs:
                    slots = session.snapshots.take(inputs, but=plan.receives, reason=WRITTEN_ONLY)
                return header, slots, inputs, tree
        except Exception as error:
            session.tool_failed(name, error)
            return None
        finally:
            session.state.busy = False

    def _after(
        self,
        plan: AtenPlan,
        header: Header,
        slots: list[Any],
        tree: Any,
        inputs: Tensors,
        result: Any,
        raised: str | None = None,
    ) -> None:
        session = self._session
        session.state.busy = True
        try:
            with torch_names.no_overrides():
                if raised == "_StopRecomputationError":
                    session.discard(slots)
                    return
                outputs: Tensors = []
                if plan.written:
                    outputs = [(f"output{slot[5:]}", t) for slot, t in inputs if slot.startswith(plan.written)]
                else:
                    flatten_result(result, outputs)
                if session.selection.outputs:
                    but = ("output",) if plan.allocates else ()
                    slots = slots + session.snapshots.take(outputs, but=but, reason=UNINITIALISED)
                session.emit(header, slots, args=tree[0], kwargs=tree[1], raised=raised)
        except Exception as error:
            session.tool_failed(header.name, error)
        finally:
            session.state.busy = False


def origin_of_backward() -> Origin | None:
    """The API call and module whose backward is being computed, as written on the node in forward."""
    node = torch_names.autograd_node()
    return None if node is None else node.metadata.get(NODE_KEY)

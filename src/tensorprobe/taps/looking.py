"""API calls for a sink that only looks: nothing is copied, named or described.

Calls are numbered as `Describing` numbers them, so that their names are those of a run of the same program. Collectives and
composite functions are described as usual. In backward the sink sees each autograd node of a call when the node has run. No
tensor is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_result
from tensorprobe.model.sink import LookingSink
from tensorprobe.ops import MOVING_NODES
from tensorprobe.taps.backward import LEAF, find_roots
from tensorprobe.taps.function_tap import Describing, Plans
from tensorprobe.taps.plans import NOT_AN_OP, FunctionPlan
from tensorprobe.taps.session import Session
from tensorprobe.taps.sites import call_at
from tensorprobe.taps.thread_state import ThreadState

_Tensor = torch.Tensor
_sequence_number, _no_overrides, _quiet = torch_names.sequence_number, torch_names.no_overrides, torch_names.quiet
_is_grad_enabled = torch.is_grad_enabled


class LookedCall(msgspec.Struct):
    """A call in progress, or one whose backward may still come. `found` belongs to the sink."""

    plan: FunctionPlan
    number: int
    module: str
    step: int
    repeat: bool
    start: int = -1
    """The sequence number of autograd when it began: its nodes have this one or greater ones. -1 where gradients are off."""
    found: Any = None

    @property
    def name(self) -> str:
        return f"{self.plan.name}.{self.number}.forward"

    @property
    def backward_name(self) -> str:
        return f"{self.plan.name}.{self.number}.backward"


class Looking:
    """Shows every call to the sink. What the sink raises is counted; its `stop` is raised between calls."""

    def __init__(self, session: Session, plans: Plans, sink: LookingSink, describing: Describing) -> None:
        self._session = session
        self._plans = plans
        self._sink = sink
        self._describing = describing
        self._skip, self._glance = sink.skip, sink.glance
        self._before, self._after = sink.before, sink.after

    def run(self, func: Any, plan: FunctionPlan, state: ThreadState, args: Any, kwargs: Any) -> Any:
        """Execute a call and look at it."""
        if plan.is_special:
            result = self._describing.run(func, plan, state, args, kwargs)
            self._end()
            return result
        session = self._session
        recompute = None if state.recompute is None else session.repetition()
        modules = state.modules
        number = session.number(plan.name, recompute)
        if not modules and self._skip is not None and self._skip(plan, args) and not _is_grad_enabled():
            # An optimizer makes a thousand small calls in a step: no object is made for one that is finite.
            result = call_at(sys._getframe(2), func, args, kwargs)
            try:
                with _no_overrides():
                    enough = self._glance(plan, number, session.step, result)
                if enough:
                    session.recorded += 1
                    return result
            except Exception as error:
                session.tool_failed(plan.name, error)
                return result
            call = LookedCall(plan, number, "", session.step, recompute is not None)
            self._sink.glanced(call)
        else:
            path = modules[-1] if modules else ""
            call = LookedCall(plan, number, path, session.step, recompute is not None)
            try:
                with _no_overrides(), _quiet():
                    self._before(call, args, kwargs or {})
            except Exception as error:
                session.tool_failed(call.name, error)
            call.start = _sequence_number()
            result = call_at(sys._getframe(2), func, args, kwargs)
        try:
            with _no_overrides(), _quiet():
                self._look(func, state, call, args, kwargs or {}, result)
        except Exception as error:
            session.tool_failed(call.name, error)
        if self._sink.stop is not None:
            self._end()
        return result

    def idle(self) -> None:
        """A backward has ended."""
        state = self._session.state
        state.busy = True
        try:
            self._sink.idle()
        except Exception as error:
            self._session.tool_failed("end of backward", error)
        finally:
            state.busy = False
        self._end()

    def _end(self) -> None:
        """Stop watching, and raise once the exception with which the sink ends the training."""
        error, self._sink.stop = self._sink.stop, None
        if error is not None:
            self._session.recording = False
            self._session.over = True
            raise error

    def _look(self, func: Any, state: ThreadState, call: LookedCall, args: Any, kwargs: Any, result: Any) -> None:
        plan = call.plan
        if type(result) is _Tensor:
            outputs = [result]
        else:
            found: Tensors = []
            flatten_result(result, found)
            outputs = [tensor for _, tensor in found]
            if not outputs and not plan.overwrites:
                self._plans[func] = NOT_AN_OP  # a query, and so are the next ones
                return
        self._after(call, args, kwargs, outputs)
        self._session.recorded += 1
        start, end = call.start, _sequence_number()
        if start < 0 or end == start or (call.repeat and not self._keeps_graph(state)):
            return
        node = torch_names.node_of(outputs[0]) if outputs and end == start + 1 else None
        if node is not None and node._sequence_nr() >= start:
            if not plan.is_view:
                node.register_hook(partial(self._in_backward, call))
        else:
            changed = outputs or plan.overwritten(args, kwargs)
            for each in _nodes_since(start, find_roots([("output", tensor) for tensor in changed], start)):
                if each.name() not in MOVING_NODES:
                    each.register_hook(partial(self._in_backward, call))

    def _keeps_graph(self, state: ThreadState) -> bool:
        return state.recompute is not None and state.recompute.keeps_graph

    def _in_backward(self, call: LookedCall, results: Any, given: Any) -> None:
        """Show the sink a node that the engine has run: the gradients it made and those it received."""
        session = self._session
        if not session.recording or session.state.busy:
            return
        try:
            with _no_overrides(), _quiet():
                self._sink.gradients(call, results, given)
        except Exception as error:
            session.tool_failed(call.backward_name, error)


def _nodes_since(start: int, roots: Iterable[Any]) -> set[Any]:
    """Return the nodes made from `start` on, without those of leaves, walking from the outermost ones."""
    nodes, todo = set(roots), list(roots)
    while todo:
        for target, _ in todo.pop().next_functions:
            if target is not None and start <= target._sequence_nr() < LEAF and target not in nodes:
                nodes.add(target)
                todo.append(target)
    return nodes

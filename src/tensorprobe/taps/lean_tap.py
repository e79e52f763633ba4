"""The API level for a sink that only looks: nothing is copied, named or described unless the looker finds something.

Calls are counted as `FunctionTap` counts them, so that their names are those that a run of the same program would hold.
Collectives and composite functions take the path of `FunctionTap`; the sink gets them as calls. In backward every autograd
node that a call has made is looked at when it is done. No tensor is kept: a call holds weak references.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_result
from tensorprobe.ops import MOVING_NODES, Trait, has
from tensorprobe.taps.backward import LEAF, find_roots
from tensorprobe.taps.collectives import Collectives
from tensorprobe.taps.function_tap import FunctionTap
from tensorprobe.taps.operators import OPERATORS, spell_operator
from tensorprobe.taps.override_free import ENGINES
from tensorprobe.taps.plans import ENGINE, NOT_AN_OP, Plan
from tensorprobe.taps.session import Session, ThreadState
from tensorprobe.taps.sinks import Looker

_Tensor = torch.Tensor
_is_compiling, _is_tracing = torch_names.is_compiling, torch_names.is_tracing
_sequence_number, _no_overrides = torch_names.sequence_number, torch_names.no_overrides
_is_grad_enabled = torch.is_grad_enabled

Place = int | str
"""Of an argument: its position, or its keyword."""


class LeanPlan:
    """What is to be known of a function before and after each of its calls."""

    __slots__ = ("allocates", "by_request", "is_view", "name", "writes")

    def __init__(self, name: str, *, allocates: bool = False, writes: tuple[Place, ...] = ()) -> None:
        self.name = name
        self.allocates = allocates
        self.is_view = has(name, Trait.VIEW)
        self.writes = writes
        self.by_request = self.name.startswith("Functional.") and not self.writes
        """Functions of torch.nn.functional take `inplace`, by keyword or by position."""

    def overwritten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that this call is going to change, as far as its function and its arguments say."""
        places: Sequence[Place] = self.writes
        if self.by_request and (kwargs.get("inplace") or any(arg is True for arg in args)):
            places = (0, "input")
        found: list[torch.Tensor] = []
        for place in places:
            value = (args[place] if place < len(args) else None) if isinstance(place, int) else kwargs.get(place)
            if isinstance(value, _Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [entry for entry in value if isinstance(entry, _Tensor)]
        return found


class LeanCall:
    """A call in progress, or one whose backward may still come."""

    __slots__ = ("found", "module", "number", "plan", "repeat", "start", "step")

    def __init__(self, plan: LeanPlan, number: int, module: str, step: int, repeat: bool) -> None:
        self.plan = plan
        self.number = number
        self.module = module
        self.step = step
        self.repeat = repeat
        self.start = -1
        """The sequence number of autograd when it began: its nodes have this one, or greater ones. -1 where gradients are off."""
        self.found: Any = None
        """The looker's own."""

    @property
    def name(self) -> str:
        return f"{self.plan.name}.{self.number}.forward"

    @property
    def backward_name(self) -> str:
        return f"{self.plan.name}.{self.number}.backward"


_UNKNOWN, _OTHER = LeanPlan(""), LeanPlan("")
"""A function not met before; one that goes another way."""


class LeanTap(FunctionTap):
    """Shows every call of one thread to a looker. What the looker raises is counted; `looker.stop` is raised between calls."""

    def __init__(self, session: Session, collectives: Collectives, looker: Looker) -> None:
        super().__init__(session, collectives, record=True)
        self._looker = looker
        self._lean: dict[Any, LeanPlan | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = self._lean.get(func, _UNKNOWN)
        if plan is None:
            return func(*args, **kwargs)
        session = self._session
        state = session.state
        if state.busy or not session.recording or _is_compiling():
            return func(*args, **kwargs)
        if plan is _UNKNOWN:
            plan = self._plan(func)
        if plan is None:
            return func(*args, **kwargs)
        if plan is _OTHER:
            return self._other(func, types, args, kwargs)
        if _is_tracing():
            session.pass_by_tracing()
            return func(*args, **kwargs)
        if self.names_operators and plan.name in OPERATORS:
            plan = self._respelled(plan, spell_operator(plan.name, sys._getframe(1)))
        looker = self._looker
        recompute = None if state.recompute is None else session.repetition()
        modules = state.modules
        number = session.number(plan.name, recompute)
        if not modules and looker.is_known(plan, args) and not _is_grad_enabled():
            # Where an optimizer makes a thousand small calls in a step: nothing is made for a call that nobody will ask for.
            result = func(*args, **kwargs)
            try:
                if looker.glance(plan, number, session.step, result):
                    session.recorded += 1
                    return result
            except Exception as error:
                session.tool_failed(plan.name, error)
                return result
            call = LeanCall(plan, number, "", session.step, recompute is not None)
            looker.passed(call)
        else:
            path = modules[-1] if modules else ""
            call = LeanCall(plan, number, path, session.step, recompute is not None)
            try:
                looker.before(call, args, kwargs)
            except Exception as error:
                session.tool_failed(call.name, error)
            call.start = _sequence_number()
            result = func(*args, **kwargs)
        try:
            self._look(func, state, call, args, kwargs, result)
        except Exception as error:
            session.tool_failed(call.name, error)
        if looker.stop is not None:
            self._end()
        return result

    def _end(self) -> None:
        """Raise what the looker wants the training to end with: once. Nothing is watched any more."""
        error, self._looker.stop = self._looker.stop, None
        if error is not None:
            self._session.recording = False
            self._session.over = True
            raise error

    def _plan(self, func: Any) -> LeanPlan | None:
        """None for what is no operation."""
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = self._make_plan(func)
        if plan is ENGINE or (plan.name is not None and (plan.distributed or not plan.is_leaf)):
            lean: LeanPlan | None = _OTHER
        else:
            lean = None
            if plan.name is not None:
                lean = LeanPlan(plan.name, allocates=plan.allocates, writes=_written(func, plan))
        self._lean[func] = lean
        return lean

    def _respelled(self, plan: LeanPlan, name: str) -> LeanPlan:
        """The plan of an operator under its name in Python."""
        found = self._lean.get(name)
        if found is None:
            found = self._lean[name] = LeanPlan(name, writes=plan.writes)
        return found

    def _other(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Functions that run the engine, collectives, and functions made of others."""
        if self._plans[func] is ENGINE:
            with self.visible_inside(kwargs):
                result = ENGINES[func](*args, **kwargs)
            self._tell_idle()
        else:
            result = super().__torch_function__(func, types, args, kwargs)
        self._end()
        return result

    def _tell_idle(self) -> None:
        state = self._session.state
        state.busy = True
        try:
            self._looker.idle()
        except Exception as error:
            self._session.tool_failed("end of backward", error)
        finally:
            state.busy = False

    def _look(self, func: Any, state: ThreadState, call: LeanCall, args: Any, kwargs: Any, result: Any) -> None:
        if type(result) is _Tensor:
            outputs = [result]
        else:
            found: Tensors = []
            flatten_result(result, found)
            outputs = [tensor for _, tensor in found]
            if not outputs and not call.plan.writes:
                self._forget(func)
                return
        self._looker.after(call, args, kwargs, outputs)
        self._session.recorded += 1
        start, end = call.start, _sequence_number()
        if start < 0 or end == start or (call.repeat and not self._keeps_graph(state)):
            return
        node = outputs[0].grad_fn if outputs and end == start + 1 else None
        if node is not None and node._sequence_nr() >= start:
            if not call.plan.is_view:
                self._hook(node, call)
        else:
            changed = outputs or call.plan.overwritten(args, kwargs)
            for each in _nodes_since(start, find_roots([("output", tensor) for tensor in changed], start)):
                if each.name() not in MOVING_NODES:
                    self._hook(each, call)

    def _keeps_graph(self, state: ThreadState) -> bool:
        return state.recompute is not None and state.recompute.keeps_graph

    def _hook(self, node: Any, call: LeanCall) -> None:
        node.register_hook(partial(self._in_backward, call))

    def _in_backward(self, call: LeanCall, results: Any, given: Any) -> None:
        """Called by the engine when a node is done: with the gradients it has made, and those it was given."""
        session = self._session
        state = session.state
        if not session.recording or state.busy:
            return
        try:
            with _no_overrides():
                self._looker.backward(call, results, given)
        except Exception as error:
            session.tool_failed(call.backward_name, error)

    def _forget(self, func: Any) -> None:
        """The call was a question, not an operation, and so will the next ones be."""
        self._plans[func] = NOT_AN_OP
        self._lean[func] = None


def _nodes_since(start: int, roots: Iterable[Any]) -> set[Any]:
    """The nodes that were made from `start` on, walked from the outermost ones. Those that belong to leaves are not among them."""
    nodes, todo = set(roots), list(roots)
    while todo:
        for target, _ in todo.pop().next_functions:
            if target is not None and start <= target._sequence_nr() < LEAF and target not in nodes:
                nodes.add(target)
                todo.append(target)
    return nodes


def _written(func: Any, plan: Plan) -> tuple[Place, ...]:
    """The arguments that a function changes whenever it is called."""
    if isinstance(func, (torch_names.OpOverload, torch_names.OpOverloadPacket)):
        overload = func if isinstance(func, torch_names.OpOverload) else getattr(func, func.overloads()[0])
        return tuple(
            place
            for number, argument in enumerate(overload._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for place in ((number, argument.name) if not argument.kwarg_only else (argument.name,))
        )
    if plan.writes:
        places = [slot.rstrip(".").removeprefix("input.") for slot in plan.writes]
        return tuple(int(p) if p.isdecimal() else p.removeprefix("kwargs.") for p in places)
    return (0, "input") if plan.mutates else ()

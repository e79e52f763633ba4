"""Moves the arguments of a call to the CPU, in the precision of the reference, and decides from its schema whether to run it twice.

There is no list of difficult ops. The schema alone says why an op is skipped: it is a view, draws random numbers, returns
uninitialised memory, needs other processes, or belongs to a library whose ops may do more than compute. Tensors are moved, devices
become the CPU, dtypes the wider ones; other arguments stay as they are. Arguments that the call changes, or that are needed later,
are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tensorprobe.model.reason import NotCompared
from tensorprobe.ops import Trait, has
from tensorprobe.replay import arguments as replay_arguments
from tensorprobe.replay.randomness import LAWFUL

_NUMBERS = frozenset(("number", "Scalar", "int", "float", "bool", "complex"))
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_dtensor"))
_STATISTICS = frozenset(("running_mean", "running_var"))

At = int | str
"""An argument: its position, or its name if it is keyword-only."""


class OpPlan(NamedTuple):
    """What is known of an op. `written`: arguments it changes. `received`: those it writes without reading.

    `skip` says why it is not compared: a member of NotCompared, or a text that names a library.
    """

    name: str
    base: str
    skip: str | None = None
    written: frozenset[At] = frozenset()
    received: frozenset[At] = frozenset()
    gives_nothing: bool = False
    reads: bool = False
    """Whether it returns a number from a tensor, as `item` does."""
    dropout: At | None = None
    """The dropout probability. If it is 0, the op is not random, although its schema says so."""
    counted: bool = True
    """False for marks of the profiler, which are no op of the program."""
    draws: bool = False
    """Whether its random numbers are judged by their distribution."""


def plan_op(func: Any, libraries: frozenset[str]) -> OpPlan:
    """Return the plan of an op from a dispatch mode."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OpPlan(str(func), str(func), NotCompared.HIGHER_ORDER)
    namespace, _, base = schema.name.rpartition("::")
    name = "Aten." + str(func).removeprefix("aten.")
    written, received = set[At](), set[At]()
    dropout: At | None = None
    for place, argument in enumerate(schema.arguments):
        at: At = argument.name if argument.kwarg_only else place
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(at)
            if argument.is_out:
                received.add(at)
        elif argument.name in _STATISTICS and "batch_norm" in base and "backward" not in base:
            written.add(at)  # missing in old schemas
        elif namespace in _COLLECTIVES and "Tensor" in str(argument.type):
            written.add(at)
        elif argument.name == "dropout_p" and torch.Tag.nondeterministic_seeded in func.tags:
            dropout = at
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    kinds = {str(value.type).removeprefix("Optional").strip("[]") for value in schema.returns}
    returns, reads = any("Tensor" in kind for kind in kinds), takes and bool(kinds & _NUMBERS)
    draws = torch.Tag.nondeterministic_seeded in func.tags and namespace == "aten" and base in LAWFUL
    plan = OpPlan(
        name, base, None, frozenset(written), frozenset(received), not (returns or reads), reads, dropout, draws=draws
    )
    return plan._replace(skip=_reason(func, plan, namespace, libraries), counted=namespace != "profiler")


def _reason(func: Any, plan: OpPlan, namespace: str, libraries: frozenset[str]) -> str | None:
    if plan.gives_nothing and not plan.written:
        return NotCompared.NO_TENSOR
    if torch.Tag.nondeterministic_seeded in func.tags and plan.dropout is None and not plan.draws:
        return NotCompared.RANDOM
    if has(f"Aten.{plan.base}", Trait.ALLOCATES):
        return NotCompared.MEMORY
    if has(f"Aten.{plan.base}", Trait.STORAGE):
        return NotCompared.STORAGE
    if func.is_view and not plan.written:
        return NotCompared.VIEW
    if namespace in _COLLECTIVES:
        return NotCompared.COLLECTIVE
    if namespace not in ("aten", "prims") and namespace not in libraries:
        return f"op of the library {namespace}: it may have side effects; compare it with libraries=[{namespace!r}]"
    return None


CPU = torch.device("cpu")
PRECISIONS = {**replay_arguments.PRECISIONS, "rounded": replay_arguments.PRECISIONS["double"]}
"""Name → dtype → dtype of the reference; others stay. `rounded` is rounded to the dtype of the call in the end."""


class CannotLift(Exception):
    """A tensor has no plain numbers for the reference."""


class Was:
    """Stands for a tensor of the call that is no longer held; only its dtype is kept."""

    __slots__ = ("dtype",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype


class Arguments:
    """The arguments of a call, in order."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def __getitem__(self, at: At) -> Any:
        if isinstance(at, int):
            return self.args[at] if at < len(self.args) else None
        return self.kwargs.get(at)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return every tensor with the name of its slot."""
        found: list[tuple[str, torch.Tensor]] = []
        for at, value in enumerate(self.args):
            _collect(value, "input.", at, found)
        for name, value in self.kwargs.items():
            _collect(value, "input.kwargs.", name, found)
        return found

    def templates(self) -> Arguments:
        """Return the arguments with `Was` in place of tensors, for `lower`."""
        return Arguments([_map(value, Was) for value in self.args], {k: _map(v, Was) for k, v in self.kwargs.items()})

    @property
    def nbytes(self) -> int:
        """The memory of the tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def replaced(self, tensors: Iterator[torch.Tensor]) -> Arguments:
        """Return the arguments with other tensors, in the order of `tensors()`."""
        return Arguments(
            [_map(value, lambda _: next(tensors)) for value in self.args],
            {k: _map(v, lambda _: next(tensors)) for k, v in self.kwargs.items()},
        )


def lift(plan: OpPlan, given: Arguments, precision: str, *, copies: bool, fresh: Any = None) -> Arguments:
    """Return the arguments for the reference. With `copies` they share no memory with the call's. `fresh` replaces the
    function that lifts a tensor."""
    wider = PRECISIONS[precision]
    written = Arguments([given[at] for at in plan.written], {})
    changed = {_memory(tensor) for _, tensor in written.tensors()} if plan.written else ()

    def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
        # In `x.add_(x)` the call would change the input before the reference reads it.
        return lift_tensor(tensor, wider, copies or (bool(changed) and _memory(tensor) in changed))

    take = fresh or fresh_copy

    def one(at: At, value: Any) -> Any:
        if at in plan.received:
            return _map(value, lambda t: torch.empty(t.shape, dtype=wider.get(t.dtype, t.dtype)))
        if plan.base in _HALF_TO_FLOAT and at in (2, "half_to_float"):
            return value if precision == "own" else False  # it is wide already
        return _lift(value, wider, take)

    return Arguments(
        [one(at, value) for at, value in enumerate(given.args)], {at: one(at, v) for at, v in given.kwargs.items()}
    )


def kept(plan: OpPlan, lifted: Arguments) -> Arguments:
    """Return lifted arguments for one run of the op. Those that it changes are copied, so that it can run again."""
    changed = plan.written - plan.received
    if not changed:
        return lifted

    def one(at: At, value: Any) -> Any:
        return _map(value, torch.clone) if at in changed else value

    return Arguments(
        [one(at, v) for at, v in enumerate(lifted.args)], {at: one(at, v) for at, v in lifted.kwargs.items()}
    )


def lower(templates: Arguments, lifted: Arguments) -> Arguments:
    """Return lifted arguments in the dtypes of the call."""

    def one(template: Any, value: Any) -> Any:
        if isinstance(template, (Was, torch.Tensor)):
            return value.to(template.dtype) if isinstance(value, torch.Tensor) else value
        if isinstance(template, (list, tuple)) and isinstance(value, (list, tuple)):
            return [one(a, b) for a, b in zip(template, value, strict=True)]
        return CPU if isinstance(template, torch.device) else template

    return Arguments(
        [one(a, b) for a, b in zip(templates.args, lifted.args, strict=True)],
        {at: one(template, lifted.kwargs[at]) for at, template in templates.kwargs.items()},
    )


def demand_numbers(tensor: torch.Tensor) -> None:
    """Raise CannotLift if a tensor is not a plain block of numbers."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise CannotLift("nested tensor" if tensor.is_nested else f"{str(tensor.layout).removeprefix('torch.')} tensor")
    if tensor.is_meta:
        raise CannotLift("meta tensor, has no values")
    if tensor.is_quantized:
        raise CannotLift("quantized tensor")


def lift_tensor(tensor: torch.Tensor, wider: dict[torch.dtype, torch.dtype], copy: bool) -> torch.Tensor:
    """Return the numbers of a tensor on the CPU."""
    demand_numbers(tensor)
    dtype = wider.get(tensor.dtype, tensor.dtype)
    if tensor.is_cpu and dtype is tensor.dtype:
        return tensor.clone() if copy else tensor.detach()
    return tensor.to(CPU, dtype)


_HALF_TO_FLOAT = frozenset(("_softmax", "_log_softmax", "_safe_softmax"))


def _memory(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share memory; 0 if it is not strided."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _lift(value: Any, wider: dict[torch.dtype, torch.dtype], take: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return take(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return [_lift(each, wider, take) for each in value]
    if kind is torch.dtype:
        return wider.get(value, value)
    return CPU if kind is torch.device else value


def _map(value: Any, change: Any) -> Any:
    """Apply `change` to every tensor or `Was` in a value."""
    if isinstance(value, (torch.Tensor, Was)):
        return change(value)
    return [_map(each, change) for each in value] if type(value) in (list, tuple) else value


def _collect(value: Any, prefix: str, at: At, found: list[tuple[str, torch.Tensor]]) -> None:
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        found.append((f"{prefix}{at}", value))
    elif kind is list or kind is tuple:
        for i, each in enumerate(value):
            _collect(each, f"{prefix}{at}.", i, found)

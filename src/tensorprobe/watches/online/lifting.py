"""The arguments of a call on the CPU, in the precision of the reference; and what the schema of its op says about running it twice.

There is no list of difficult ops. An op is skipped only for what its schema says: it returns no new numbers (a view), draws
random ones, returns uninitialised memory, needs other processes, or belongs to a library whose ops may do more than compute.
Only numbers are moved: other arguments stay as they are, but devices become the CPU and dtypes the wider ones. An argument
that the call changes is copied, and so is everything that is looked at later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tensorprobe.ops import Trait, has
from tensorprobe.replay import arguments as replay_arguments

VIEW, RANDOM, MEMORY = "view", "random", "memory as it is found"
COLLECTIVE, QUESTION, STORAGE = (
    "collective: needs the other processes",
    "gives no tensor",
    "changes storage, not numbers",
)
_NUMBERS = frozenset(("number", "Scalar", "int", "float", "bool", "complex"))
NO_OP = ""
"""For what is not counted as an op at all."""
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_dtensor"))
_STATISTICS = frozenset(("running_mean", "running_var"))

At = int | str
"""An argument: its position, or its name when it is given by name only."""


class OpPlan(NamedTuple):
    """`skip` is why it is not compared. `written` are the arguments it changes, `received` those of them it only writes to."""

    name: str
    base: str
    skip: str | None = None
    written: frozenset[At] = frozenset()
    received: frozenset[At] = frozenset()
    gives_nothing: bool = False
    reads: bool = False
    """Whether it only reads a number out of tensors, as `item` does."""
    dropout: At | None = None
    """The probability without which an op that its schema calls random is not."""


def plan_op(func: Any, libraries: frozenset[str]) -> OpPlan:
    """The plan for an op as a dispatch mode meets it."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OpPlan(str(func), str(func), "higher-order op: what it calls is compared, if it is seen")
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
            written.add(at)  # old schemas do not say so
        elif namespace in _COLLECTIVES and "Tensor" in str(argument.type):
            written.add(at)
        elif argument.name == "dropout_p" and torch.Tag.nondeterministic_seeded in func.tags:
            dropout = at
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    kinds = {str(value.type).removeprefix("Optional").strip("[]") for value in schema.returns}
    returns, reads = any("Tensor" in kind for kind in kinds), takes and bool(kinds & _NUMBERS)
    plan = OpPlan(name, base, None, frozenset(written), frozenset(received), not (returns or reads), reads, dropout)
    return plan._replace(skip=_reason(func, plan, namespace, libraries))


def _reason(func: Any, plan: OpPlan, namespace: str, libraries: frozenset[str]) -> str | None:
    if namespace == "profiler":
        return NO_OP
    if plan.gives_nothing and not plan.written:
        return QUESTION
    if torch.Tag.nondeterministic_seeded in func.tags and plan.dropout is None:
        return RANDOM
    if has(f"Aten.{plan.base}", Trait.ALLOCATES):
        return MEMORY
    if has(f"Aten.{plan.base}", Trait.STORAGE):
        return STORAGE
    if func.is_view and not plan.written:
        return VIEW
    if namespace in _COLLECTIVES:
        return COLLECTIVE
    if namespace not in ("aten", "prims") and namespace not in libraries:
        return f"op of the library {namespace}: done twice it may do harm; name the library to have it compared"
    return None


CPU = torch.device("cpu")
PRECISIONS = {**replay_arguments.PRECISIONS, "rounded": replay_arguments.PRECISIONS["double"]}
"""Name → dtype → the dtype of the reference; those not named stay. `rounded` goes back to the dtype of the call in the end."""


class CannotLift(Exception):
    """A tensor that has no plain numbers to give to the reference."""


class Was:
    """Stands for a tensor of the call once that is let go of: all that is left of it is its dtype."""

    __slots__ = ("dtype",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype


class Arguments:
    """Arguments of a call, in order; `written` ones come as copies that the call may change."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def __getitem__(self, at: At) -> Any:
        if isinstance(at, int):
            return self.args[at] if at < len(self.args) else None
        return self.kwargs.get(at)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor, with the name of its slot."""
        found: list[tuple[str, torch.Tensor]] = []
        for at, value in enumerate(self.args):
            _collect(value, "input.", at, found)
        for name, value in self.kwargs.items():
            _collect(value, "input.kwargs.", name, found)
        return found

    def templates(self) -> Arguments:
        """The same without the tensors: what is needed to go back to their dtypes."""
        return Arguments([_map(value, Was) for value in self.args], {k: _map(v, Was) for k, v in self.kwargs.items()})

    @property
    def nbytes(self) -> int:
        """How much memory the tensors take."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def replaced(self, tensors: Iterator[torch.Tensor]) -> Arguments:
        """The same with other tensors, in the order of `tensors()`."""
        return Arguments(
            [_map(value, lambda _: next(tensors)) for value in self.args],
            {k: _map(v, lambda _: next(tensors)) for k, v in self.kwargs.items()},
        )


def lift(plan: OpPlan, given: Arguments, precision: str, *, copies: bool, fresh: Any = None) -> Arguments:
    """The arguments for the reference. With `copies` they share no memory with the call's. `fresh` lifts tensors instead."""
    wider = PRECISIONS[precision]
    written = Arguments([given[at] for at in plan.written], {})
    changed = {_memory(tensor) for _, tensor in written.tensors()} if plan.written else ()

    def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
        # In `x.add_(x)` what is read is what is written: the call would have changed it before the reference reads it.
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
    """Lifted arguments for one run of the op: those it changes are copies, so that there can be another run."""
    changed = plan.written - plan.received
    if not changed:
        return lifted

    def one(at: At, value: Any) -> Any:
        return _map(value, torch.clone) if at in changed else value

    return Arguments(
        [one(at, v) for at, v in enumerate(lifted.args)], {at: one(at, v) for at, v in lifted.kwargs.items()}
    )


def lower(templates: Arguments, lifted: Arguments) -> Arguments:
    """Lifted arguments in the dtypes that the call had them in."""

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
    """CannotLift with the reason when a tensor is not a plain block of numbers."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise CannotLift("nested tensor" if tensor.is_nested else f"{str(tensor.layout).removeprefix('torch.')} tensor")
    if tensor.is_meta:
        raise CannotLift("meta tensor, has no values")
    if tensor.is_quantized:
        raise CannotLift("quantized tensor")


def lift_tensor(tensor: torch.Tensor, wider: dict[torch.dtype, torch.dtype], copy: bool) -> torch.Tensor:
    """The numbers of a tensor on the CPU."""
    demand_numbers(tensor)
    dtype = wider.get(tensor.dtype, tensor.dtype)
    if tensor.is_cpu and dtype is tensor.dtype:
        return tensor.clone() if copy else tensor.detach()
    return tensor.to(CPU, dtype)


_HALF_TO_FLOAT = frozenset(("_softmax", "_log_softmax", "_safe_softmax"))


def _memory(tensor: torch.Tensor) -> int:
    """What tensors have in common that share memory; 0 for those that have none of their own."""
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
    """The same with every tensor, or what stands for one, changed."""
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

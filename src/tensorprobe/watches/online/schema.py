"""What the schema of an ATen op says about doing it a second time: whether it can be compared, what it writes, what it is called.

There is no list of ops that are difficult. An op is left out only for what its schema says: it gives no new numbers (a
view), draws random ones, gives memory as it finds it, talks to other processes, or belongs to a library whose ops may do
more than compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tensorprobe.ops import Trait, has

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

"""The rules that decide whether a NaN or inf in the output of a call is intentional.

They see `Facts`: counts and ranges of the tensors of a call. A watch makes facts from tensors in memory (`looker`), a search
in a recorded run makes them from stored statistics. Nothing here imports torch.

The first rule that fits decides. A NaN or inf among the inputs is *bad* (from an earlier finding), *intended* or *doubtful*.

1.  allowed    the user's list names the op, the call or the module                            → intended
2.  inherited  an input is bad                                                                 → spread of that finding
3.  doubtful   an input is doubtful and the output is NaN, +inf or a single number             → finding: the doubtful call
4.  NaN        from finite inputs or intended infinities (0 · inf, inf - inf, a fully masked row)  → finding
5.  given      every inf of the output was an argument: masked_fill, where, full, fill_, x[m] = -inf → intended
6.  passed on  the inputs hold intended infinities, and the output has none elsewhere          → intended
7.  doubtful   only -inf, in forward, from a logarithm, a cast, a sum or a product with a number: perhaps a mask,
               unless the output is 0-d and no cast. It becomes a finding when rule 3 applies to it, and counts as
               intended otherwise.
8.  numbers    the call has no tensor argument, or a NaN among its numbers                     → arrival (data)
9.             anything else                                                                   → finding
An input from outside with -inf, without +inf and NaN, is a mask: intended. So is a single infinite number.
Parameters and gradients are never masks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tensorprobe.model.interrupts import let_through
from tensorprobe.model.overflow import BadOutput, Extent
from tensorprobe.numerics.summary import Moments, greatest_finite
from tensorprobe.ops import Trait, has, plain_name


class Facts(NamedTuple):
    """What the rules know of a tensor. `key` is equal for tensors that share memory, or content. `values` returns the tensor
    if it is still available. `never_mask`: it is a parameter or a gradient."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    moments: Moments
    key: Hashable
    values: Callable[[], Any] | None = None
    never_mask: bool = False

    @property
    def clean(self) -> bool:
        return not (self.moments.nan or self.moments.inf)

    @property
    def signs(self) -> frozenset[float]:
        """Return which infinities it holds: inf, -inf, both or none."""
        return frozenset(end for end in (self.moments.max, self.moments.min) if math.isinf(end))

    @property
    def single(self) -> bool:
        return math.prod(self.shape) == 1

    def extent(self, producer: str | None = None) -> Extent:
        """Return it as an input in the report."""
        m = self.moments
        ends = [abs(end) for end in (m.max, m.min) if math.isfinite(end)]
        largest = max(ends, default=0.0)
        return Extent(
            slot=self.slot,
            dtype=self.dtype,
            shape=list(self.shape),
            min=m.min,
            max=m.max,
            nan=m.nan,
            inf=m.inf,
            margin=greatest_finite(self.dtype) / largest if largest else math.inf,
            producer=producer,
        )

    def as_output(self, count: int | None = None, first: list[list[int]] | None = None) -> BadOutput:
        """Return it as an output in the report."""
        m = self.moments
        return BadOutput(
            slot=self.slot,
            dtype=self.dtype,
            shape=list(self.shape),
            nan=m.nan,
            inf=m.inf,
            count=m.nan + m.inf if count is None else count,
            elements=math.prod(self.shape),
            first=first or [],
        )


def forward_extents(inputs: Iterable[Facts], bad: Iterable[BadOutput]) -> list[Extent]:
    """Return the inputs of a forward call for the report on its backward, with their values at the first bad place."""
    first = next((output for output in bad if output.first), None)
    found = []
    for facts in inputs:
        here = None
        if first is not None and facts.values is not None and list(facts.shape) == first.shape:
            here = float(facts.values()[tuple(first.first[0])])
        found.append(msgspec.structs.replace(facts.extent(), here=here))
    return found


Standing = Literal["intended", "doubtful", "bad"]


class Origin(NamedTuple):
    """Where a NaN or inf comes from. `source` is the finding of the ledger, if it is bad or doubtful."""

    standing: Standing
    source: Any = None


INTENDED = Origin("intended")


class Seen(NamedTuple):
    """A call that returned a NaN or inf, as the rules see it."""

    name: str
    op: str
    module: str
    args: Any
    kwargs: Any
    inputs: Sequence[Facts]
    outputs: Sequence[Facts]


def is_allowed(allow: Iterable[str], *names: str) -> bool:
    """Return whether a pattern (a glob) of the user's list matches one of the names: op, call, module."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow for name in names if name)


def from_outside(facts: Facts) -> Origin | None:
    """Return the origin of a tensor that no watched call made: intended if it is a mask, else None."""
    if facts.moments.nan or facts.never_mask:
        return None
    return INTENDED if facts.signs == {-math.inf} or facts.single else None


def arguments(call: Seen) -> list[Any]:
    """Return all arguments, positional ones first."""
    return [*(call.args or ()), *(call.kwargs or {}).values()]


def given_numbers(tree: Any) -> Iterator[float]:
    """Yield every plain number in a tree of arguments."""
    if isinstance(tree, bool):
        return
    if isinstance(tree, (int, float)):
        yield float(tree)
    elif isinstance(tree, list):
        for part in tree:
            yield from given_numbers(part)
    elif isinstance(tree, dict):
        if tree.get("type") == "float":
            yield float(tree["value"])
        elif "slot" not in tree and tree.get("type") in ("tuple", "dict"):
            value = tree["value"]
            yield from given_numbers(list(value.values()) if isinstance(value, dict) else value)


def is_intended(call: Seen) -> bool:
    """Rules 5 and 6: return whether all infinities were arguments or passed on. The call has no NaN and no bad input."""
    signs = frozenset[float]().union(*(facts.signs for facts in call.outputs))
    given = {number for number in given_numbers(arguments(call)) if math.isinf(number)}
    given |= {sign for facts in call.inputs if facts.single for sign in facts.signs}
    if plain_name(call.op) in ("neg", "sub", "rsub", "mul", "div"):
        given |= {-sign for sign in given}
    if given and signs <= given:
        return True
    passed = frozenset[float]().union(*(facts.signs for facts in call.inputs))
    if not passed:
        return False
    if has(call.op, Trait.ELEMENTWISE):
        elsewhere = new_places(call)
        if elsewhere is not None:
            return elsewhere == 0 or bool(given)
    return signs <= passed | given


def new_places(call: Seen) -> int | None:
    """Return how many infinities of the output are where no input has one; None if that is unknown."""
    holders = [facts for facts in call.inputs if not facts.clean]
    if len(call.outputs) != 1 or call.outputs[0].values is None or any(facts.values is None for facts in holders):
        return None
    output = call.outputs[0].values()
    covered = None
    for facts in holders:
        infinite = facts.values().isinf()  # type: ignore[misc]
        try:
            infinite = infinite.expand(output.shape)
        except RuntimeError as error:
            let_through(error)
            return None
        covered = infinite if covered is None else covered | infinite
    found = output.isinf() if covered is None else output.isinf() & ~covered.to(output.device)
    return int(found.sum())


def made_of_numbers(call: Seen) -> bool:
    """Rule 8: return whether the call only puts numbers of the program into a tensor, or has a NaN among its arguments."""
    if call.args is None and call.kwargs is None:
        return False
    return not _any_slot(arguments(call)) or any(map(math.isnan, given_numbers(arguments(call))))


def _any_slot(tree: Any) -> bool:
    """Return whether there is a tensor among the arguments."""
    if isinstance(tree, list):
        return any(_any_slot(part) for part in tree)
    if isinstance(tree, dict):
        return "slot" in tree or any(_any_slot(part) for part in tree.values())
    return False


def may_be_mask(call: Seen) -> bool:
    """Rule 7: return whether the call may be building a mask. A 0-d result is none, but its cast may be the fill of one."""
    if all(not facts.shape for facts in call.outputs) and not has(call.op, Trait.CASTS):
        return False
    signs = frozenset[float]().union(*(facts.signs for facts in call.outputs))
    never = call.name.endswith("backward") or any(facts.never_mask for facts in call.outputs)
    return signs == {-math.inf} and has(call.op, Trait.MAKES_MASKS) and not never


def does_harm(call: Seen) -> bool:
    """Rule 3: return whether a doubtful infinity has become a NaN, +inf or an infinite scalar."""
    return any(facts.moments.nan or math.inf in facts.signs or facts.single for facts in call.outputs)

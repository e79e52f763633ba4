"""Which infinities are meant: the rules by which a call that gives something not finite is judged. No tensors, no torch.

In order, the first that fits decides. What is not finite in the inputs has an origin: *bad* (born earlier, or came in from
outside), *intended*, or *doubtful*.

1.  allowed    the user's list names the op, the call or the module                            → intended
2.  inherited  an input holds something bad                                                    → spread of that
3.  doubtful   an input is doubtful and the output is NaN, +inf, or a single number            → the doubtful call gave birth
4.  NaN        out of finite inputs, or out of intended infinities (0 · inf, inf - inf, a row masked everywhere) → birth
5.  given      every infinity of the output was an argument: masked_fill, where, full, fill_, x[m] = -inf → intended
6.  passed on  the inputs hold intended infinities, and the output has none elsewhere          → intended
7.  doubtful   only -inf, in a forward call, made by a logarithm, a cast, a sum or a product with a number: a mask that is being made.
               It is a birth as soon as rule 3 finds that it did harm, and none if it never does.
8.  numbers    the call has no tensor among its arguments, or a NaN as a number: data          → came in
9.             anything else                                                                   → birth
A tensor from outside that holds -inf and neither +inf nor NaN is a mask: intended. So is a single infinite number.
Parameters and gradients are never masks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from tensorprobe.ops import Trait, has, plain_name
from tensorprobe.watches.overflow.facts import Facts

Standing = Literal["intended", "doubtful", "bad"]


class Origin(NamedTuple):
    """Where something not finite comes from. `source` is a finding of the ledger, for what is bad or doubtful."""

    standing: Standing
    source: Any = None


INTENDED = Origin("intended")


class Seen(NamedTuple):
    """A call that gave something not finite, as the rules see it."""

    name: str
    op: str
    module: str
    args: Any
    kwargs: Any
    inputs: Sequence[Facts]
    outputs: Sequence[Facts]


def is_allowed(allow: Iterable[str], *names: str) -> bool:
    """Whether the user's list fits an op, the name of a call or the path of a module; with globs."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow for name in names if name)


def from_outside(facts: Facts) -> Origin | None:
    """The origin of a tensor that no watched call has made: intended when it is a mask; None when it is not."""
    if facts.moments.nan or facts.never_mask:
        return None
    return INTENDED if facts.signs == {-math.inf} or facts.single else None


def arguments(call: Seen) -> list[Any]:
    """The trees of all arguments, by position and by keyword."""
    return [*(call.args or ()), *(call.kwargs or {}).values()]


def given_numbers(tree: Any) -> Iterator[float]:
    """Every plain number in a tree of arguments."""
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


def is_meant(call: Seen) -> bool:
    """Rules 5 and 6: whether all infinities of the outputs were given, or passed on. There is no NaN, and nothing bad."""
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
    """How many infinities of the output stand where no input has one; None when it cannot be told."""
    holders = [facts for facts in call.inputs if not facts.clean]
    if len(call.outputs) != 1 or call.outputs[0].values is None or any(facts.values is None for facts in holders):
        return None
    output = call.outputs[0].values()
    covered = None
    for facts in holders:
        infinite = facts.values().isinf()  # type: ignore[misc]
        try:
            infinite = infinite.expand(output.shape)
        except RuntimeError:
            return None
        covered = infinite if covered is None else covered | infinite
    found = output.isinf() if covered is None else output.isinf() & ~covered.to(output.device)
    return int(found.sum())


def made_of_numbers(call: Seen) -> bool:
    """Whether a call only puts numbers of the program into a tensor, or was given a NaN: data that are so."""
    if call.args is None and call.kwargs is None:
        return False
    return not _any_slot(arguments(call)) or any(map(math.isnan, given_numbers(arguments(call))))


def _any_slot(tree: Any) -> bool:
    """Whether there is a tensor among arguments."""
    if isinstance(tree, list):
        return any(_any_slot(part) for part in tree)
    if isinstance(tree, dict):
        return "slot" in tree or any(_any_slot(part) for part in tree.values())
    return False


def may_be_mask(call: Seen) -> bool:
    """Rule 7."""
    signs = frozenset[float]().union(*(facts.signs for facts in call.outputs))
    never = call.name.endswith("backward") or any(facts.never_mask for facts in call.outputs)
    return signs == {-math.inf} and has(call.op, Trait.MAKES_MASKS) and not never


def does_harm(call: Seen) -> bool:
    """Rule 3: whether what came of a doubtful infinity is more than that."""
    return any(facts.moments.nan or math.inf in facts.signs or facts.single for facts in call.outputs)

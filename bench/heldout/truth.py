"""Where a fault really is: found in the digests of a right and a faulty run of the same program on the same device.

Nothing is judged here and no tolerance is used. The guilty call is the first whose inputs have equal bits and whose outputs have
not; where there is none, the difference came from outside of the recorded calls, and the first call that reads it is the place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import tensorprobe

_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_FLOAT32 = 2e-6
"""What sums of float32 may lose here."""
_MASK = 1e8
"""Larger magnitudes are masks, and are no part of an error."""
_CLEAR = 4.0
"""Errors from this many roundoffs on are above rounding."""


@dataclass
class Truth:
    """What a comparison must name. `region` holds calls that are near enough: around, inside, or the other direction."""

    step: int = -1
    ranks: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    region: list[str] = field(default_factory=list)
    outside: bool = False
    """Whether no recorded call made the difference."""
    roundoffs: float = 0.0
    """Size of the error in units of what its dtype must lose."""

    @property
    def above(self) -> bool:
        return self.roundoffs >= _CLEAR

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"region": self.region[:20], "above": self.above}


Pairs = list[tuple[Any, Any]]
"""Calls of the right run and of the faulty one; None where one side has no partner."""


def find_truth(right: Path, again: Path, wrong: Path) -> Truth:
    """Return the place where a faulty run leaves the right one. Empty when no bit differs.

    `again` is a second right run: what differs between the two, such as memory that nobody wrote, is left out.
    """
    runs = [tensorprobe.open_run(each) for each in (right, again, wrong)]
    for step in runs[0].steps:
        found = {
            rank: _first(*_stable(*(list(run.calls(step=step, rank=rank)) for run in runs))) for rank in runs[0].ranks
        }
        found = {rank: truth for rank, truth in found.items() if truth.calls}
        alone = {rank: truth for rank, truth in found.items() if not truth.calls[0].startswith("Distributed.")}
        if chosen := alone or found:  # a collective only brings what another rank did
            inside = {rank: truth for rank, truth in chosen.items() if not truth.outside} or chosen
            truth = next(iter(inside.values()))
            truth.step, truth.ranks = step, list(inside)
            for other in inside.values():
                truth.calls += [each for each in other.calls if each not in truth.calls]
            return truth
    return Truth()


def _stable(right: list[Any], again: list[Any], wrong: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the calls of the right and the faulty run without the tensors that differ between two right runs."""
    digests = {(call.name, call.repeat, slot.name): slot.digest for call in again for slot in call.slots}
    unstable = {
        (call.name, call.repeat, slot.name)
        for call in right
        for slot in call.slots
        if digests.get((call.name, call.repeat, slot.name), slot.digest) != slot.digest
    }
    return _without(right, unstable), _without(wrong, unstable)


def _without(calls: list[Any], unstable: set[tuple[str, int, str]]) -> list[Any]:
    if not unstable:
        return calls
    plain = ("name", "op", "level", "direction", "module", "parent", "origin", "args", "kwargs")
    return [
        SimpleNamespace(
            slots=[slot for slot in call.slots if (call.name, call.repeat, slot.name) not in unstable],
            **{key: getattr(call, key) for key in plain},
        )
        for call in calls
    ]


def add_region(truth: Truth, baseline: Path, candidate: Path) -> None:
    """Add the calls around the truth that have no partner in another program of the same model, on both sides."""
    calls = [
        list(tensorprobe.open_run(run).calls(step=truth.step, rank=truth.ranks[0])) for run in (baseline, candidate)
    ]
    pairs = match_calls(*calls)
    for number, pair in enumerate(pairs):
        if None in pair and pair[1] is not None and pair[1].name in truth.calls:
            for way in (range(number, -1, -1), range(number, len(pairs))):
                for near in itertools.takewhile(lambda at: None in pairs[at], way):
                    truth.region += [call.name for call in pairs[near] if call is not None]


def _first(right: list[Any], wrong: list[Any]) -> Truth:
    pairs = match_calls(right, wrong)
    different = [number for number, pair in enumerate(pairs) if None in pair or _differs(*pair, "")]
    if not different:
        return Truth()
    first, matched = different[0], [number for number in different if None not in pairs[number]]
    asked = bool(matched) and _constants(pairs[matched[0]][0]) != _constants(pairs[matched[0]][1])
    guilty = [number for number in matched if _is_guilty(pairs, number, different, asked=asked)]
    read = next((number for number in matched if _reads_other_parameters(*pairs[number])), None)
    if read is not None:  # modules around it give other results, and are not the cause
        guilty = [number for number in guilty if not _encloses(pairs[number][0], pairs[read][0])]
        first = read if not guilty or guilty[0] > read else first
    if guilty and (guilty[0] == first or _is_module_around(pairs[guilty[0]][0], pairs[first])):
        return _struck([pairs[number] for number in guilty], right)
    # Calls that only one side makes, and the first that reads something else.
    block = list(
        itertools.takewhile(lambda number: number in different and None in pairs[number], range(first, len(pairs)))
    )
    place = pairs[next((number for number in matched if number >= first), first)]
    names = [call.name for pair in [*(pairs[number] for number in block), place] for call in pair if call is not None]
    size = float("inf") if block or None in place else max(_sizes(*place, "input"), default=0.0)
    region = _around(place[0] or place[1], right)
    return Truth(calls=list(dict.fromkeys(names)), outside=True, roundoffs=size, region=region)


def _struck(pairs: Pairs, right: list[Any]) -> Truth:
    """The calls that go wrong by themselves, without those that only hold the first of them."""
    first = pairs[0][0]
    around = _around(first, right)
    own = [(one, other) for one, other in pairs if one is first or one.name not in around]
    size = max((each for pair in own for each in _sizes(*pair, "output")), default=0.0)
    return Truth(calls=[one.name for one, _ in own], region=around, roundoffs=size)


def match_calls(right: list[Any], wrong: list[Any]) -> Pairs:
    """Pair the calls of two runs: by name where both have the same, otherwise like a diff of op, module and shapes."""
    if [call.name for call in right] == [call.name for call in wrong]:
        return list(zip(right, wrong, strict=True))
    keys = [[(c.op, c.direction, c.module, tuple(s.shape for s in c.slots)) for c in calls] for calls in (right, wrong)]
    pairs: Pairs = []
    for _, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if keys[0][a:b] == keys[1][c:d]:
            pairs += zip(right[a:b], wrong[c:d], strict=True)
        else:
            pairs += [(call, None) for call in right[a:b]] + [(None, call) for call in wrong[c:d]]
    return pairs


def _is_guilty(pairs: Pairs, number: int, different: list[int], *, asked: bool) -> bool:
    """Whether outputs differ and inputs do not; for a gradient, whether its forward call was equal too.

    With `asked` the program asks for something else from the first call on: then other constants are a reason too.
    """
    call, other = pairs[number]
    if not _differs(call, other, "output"):
        return False
    if _differs(call, other, "input") and not (asked and _constants(call) != _constants(other)):
        return False
    if call.direction == "forward" or call.level == "aten":
        return True
    return not any(each and each.name == _turned(call.name) for other in different for each in pairs[other][:1])


def _reads_other_parameters(one: Any, other: Any) -> bool:
    """Whether a module computes forward with parameters that differ."""
    sides = [[_bits(slot) for slot in call.slots if slot.side == "parameters"] for call in (one, other)]
    return one.direction == "forward" and sides[0] != sides[1]


def _constants(call: Any) -> list[str]:
    """The arguments that are no tensors, however they are given."""
    return sorted(_leaves([call.args or (), call.kwargs or {}]))


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict) and "slot" in tree:
        return
    if isinstance(tree, dict | list | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)
    else:
        yield repr(tree)


def _is_module_around(module: Any, pair: tuple[Any, Any]) -> bool:
    """Whether both are modules, in the same direction, and the first holds the second."""
    call = pair[0] or pair[1]
    return call.level == "module" and _encloses(module, call)


def _encloses(module: Any, call: Any) -> bool:
    same = module.level == "module" and module.direction == call.direction
    return same and (not module.module or f"{call.module}.".startswith(f"{module.module}."))


def _turned(name: str) -> str:
    """The name of the same call in the other direction."""
    one, other = ("forward", "backward") if ".forward" in name else ("backward", "forward")
    return name.replace(f".{one}", f".{other}")


def _around(call: Any, calls: list[Any]) -> list[str]:
    """Calls that are near enough: the other direction, calls around it, and for ATen those of the same API call."""
    owner = (call.parent or call.origin) if call.level == "aten" else None
    found = [_turned(call.name), call.parent]
    found += [
        other.name for other in calls if _encloses(other, call) or (owner and owner in (other.parent, other.origin))
    ]
    return [name for name in found if name and name != call.name]


def _slots(call: Any, side: str) -> list[Any]:
    """The tensors of one side, in order; parameters are read in forward and written in backward. Empty side: all.

    Names are left alone: the same argument may be given by position or by keyword.
    """
    own = "input" if call.direction == "forward" else "output"
    return [slot for slot in call.slots if not side or side == (own if slot.side == "parameters" else slot.side)]


def _differs(one: Any, other: Any, side: str) -> bool:
    return [_bits(slot) for slot in _slots(one, side)] != [_bits(slot) for slot in _slots(other, side)]


def _bits(slot: Any) -> tuple[Any, ...]:
    """Two tensors of a program have equal values when these agree. A digest alone says nothing of the order in memory."""
    return slot.digest, slot.shape, slot.stride


def _sizes(one: Any, other: Any, side: str) -> Iterator[float]:
    """Errors in units of roundoff: of the norm, and half of the largest of an element. Infinite where shapes differ."""
    sides = _slots(one, side), _slots(other, side)
    if len(sides[0]) != len(sides[1]):
        yield float("inf")
    for a, b in zip(*sides, strict=False):
        if a.shape != b.shape:
            yield float("inf")
        elif _bits(a) != _bits(b) and a.has_data and b.has_data:
            yield _size(_as_double(a.tensor()), _as_double(b.tensor())) / _ROUNDOFF.get(a.dtype, _FLOAT32)


def _size(x: torch.Tensor, y: torch.Tensor) -> float:
    masks = [(~each.isfinite()) | (each.abs() > _MASK) for each in (x, y)]
    if not torch.equal(*masks):
        return float("inf")
    x, y = x[~masks[0]], y[~masks[1]]
    if not x.numel():
        return 0.0
    rms = x.square().mean().sqrt().clamp_min(1e-30)
    worst = ((x - y).abs() / torch.maximum(x.abs(), rms)).max() / 2
    return float(torch.maximum(worst, (x - y).norm() / x.norm().clamp_min(1e-30)))


def _as_double(x: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).double()

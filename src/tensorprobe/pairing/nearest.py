"""Suggest the nearest call for a call without a partner, and a reason when no calls pair at all.

In: an alignment and the entries of both sides. Out: suggestions for messages. Nothing is paired here.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from tensorprobe.ops.names import FAMILIES, canonical_op, family_of, level_of, parse_call_name
from tensorprobe.pairing.call_columns import Detail
from tensorprobe.record.run import Entry

if TYPE_CHECKING:
    from tensorprobe.pairing.align import Alignment

SideName = Literal["baseline", "candidate"]

_SIMILAR = 0.6
_NEARBY = 64
_LOOK_AT = 8
_WRAPPERS = {
    "module": " (DDP)",
    "_fsdp_wrapped_module": " (FSDP)",
    "_orig_mod": " (torch.compile)",
    "_checkpoint_wrapped_module": " (activation checkpointing)",
}
_MOST_NAMES = 100_000


class Suggestion(NamedTuple):
    """A call of the other side, why it is suggested, and whether it already has another partner."""

    position: int
    reason: str
    is_paired: bool


class _Traits(NamedTuple):
    op: str
    direction: str
    module: str


class _Side:
    """The calls of one side, for lookup."""

    def __init__(self, entries: Sequence[Entry], details: Sequence[Detail], only: list[int], paired: list[int]) -> None:
        self._entries, self._details = entries, details
        self.only = only
        self.paired = paired
        self.by_module: dict[tuple[str, str], list[int]] = {}
        self.by_op: dict[tuple[str, str], list[int]] = {}
        for position in only:
            traits = self.traits(position)
            self.by_module.setdefault((traits.module, traits.direction), []).append(position)
            self.by_op.setdefault((traits.op, traits.direction), []).append(position)

    def __len__(self) -> int:
        return len(self._entries)

    def traits(self, position: int) -> _Traits:
        op, _, direction = parse_call_name(self._entries[position].name)
        op = canonical_op(op)
        module = op.rpartition(".")[0] if op.startswith("Module.") else self._details[position].module
        return _Traits(op, direction, module)


class Suggestions:
    """Suggestions for the unpaired calls of one alignment. Make it once and ask often."""

    def __init__(
        self,
        alignment: Alignment,
        baseline: Sequence[Entry],
        candidate: Sequence[Entry],
        details: Callable[[SideName], Sequence[Detail]],
    ) -> None:
        by_candidate = sorted((right, left) for left, right in alignment.pairs)
        self._partners = {
            "baseline": [right for _, right in alignment.pairs],
            "candidate": [left for _, left in by_candidate],
        }
        self._sides = {
            "baseline": _Side(baseline, details("baseline"), alignment.only_baseline, [p[0] for p in alignment.pairs]),
            "candidate": _Side(candidate, details("candidate"), alignment.only_candidate, [p[0] for p in by_candidate]),
        }

    def nearest(self, side: SideName, position: int) -> Suggestion | None:
        """Return the call of the other side that an unpaired call most likely belongs to; None when nothing is near."""
        other = self._sides["candidate" if side == "baseline" else "baseline"]
        wanted = self._sides[side].traits(position)
        place = self._expected_place(side, position)
        near = {
            *_around(other.by_module.get((wanted.module, wanted.direction), []), place),
            *_around(other.by_op.get((wanted.op, wanted.direction), []), place),
            *_around(other.only, place),
        }
        rated = [(_rate(wanted, other.traits(each), abs(each - place)), -each) for each in near]
        best = max((rating for rating in rated if rating[0] is not None), default=None)
        if best is not None and best[0] is not None:
            return Suggestion(-best[1], best[0][1], False)
        return self._nearest_paired(other, wanted, place)

    def _expected_place(self, side: SideName, position: int) -> int:
        """Return where a partner is expected: after the partner of the pair before."""
        before = bisect_left(self._sides[side].paired, position)
        return self._partners[side][before - 1] + 1 if before else 0

    def _nearest_paired(self, other: _Side, wanted: _Traits, place: int) -> Suggestion | None:
        around = range(max(0, place - _NEARBY), min(len(other), place + _NEARBY))
        same = [each for each in around if other.traits(each) == wanted]
        if not same:
            return None
        return Suggestion(min(same, key=lambda each: abs(each - place)), "same op nearby, with another partner", True)


def _around(positions: list[int], place: int) -> list[int]:
    at = bisect_left(positions, place)
    return positions[max(0, at - _LOOK_AT) : at + _LOOK_AT]


def _rate(wanted: _Traits, offered: _Traits, distance: int) -> tuple[float, str] | None:
    """Return how good a suggestion is, and why; None if it is not worth making."""
    if wanted.direction != offered.direction:
        return None
    similarity = op_similarity(wanted.op, offered.op)
    in_module = wanted.module == offered.module and (wanted.module != "" or distance <= _NEARBY)
    nearness = 1 / (1 + distance)
    if in_module and similarity >= _SIMILAR:
        return 4 + similarity + nearness, "same module, similar op" if similarity < 1 else "same module, same op"
    if similarity == 1 and distance <= _NEARBY:
        return 2 + nearness, "same op nearby"
    if in_module and distance <= 2:
        return nearness, "same position in the same module"
    return None


def op_similarity(one: str, other: str) -> float:
    """Return from 0 to 1 how similar the names are, without their families: `Functional.silu` is like `NPU.npu_silu`."""
    if one == other:
        return 1.0
    short, long = sorted(
        (op.rpartition(".")[2].removeprefix("npu_").strip("_").lower() for op in (one, other)), key=len
    )
    if len(short) >= 3 and short in long:
        return 0.95
    return 0.95 * difflib.SequenceMatcher(None, short, long).ratio()


def nothing_paired_hint(baseline_names: Iterable[str], candidate_names: Iterable[str]) -> str:
    """Return a likely reason why no call has a partner, and what to try."""
    baseline, candidate = ([*islice(names, _MOST_NAMES)] for names in (baseline_names, candidate_names))
    for side, names in (("baseline", baseline), ("candidate", candidate)):
        if not names:
            return f"The {side} holds no calls."
        odd = next((name for name in names if family_of(name) not in FAMILIES), None)
        if odd is not None and all(family_of(name) not in FAMILIES for name in names):
            return f"The {side}'s names, such as {odd!r}, are not call names such as 'Functional.conv2d.0.forward'."
    return (
        _other_level(baseline, candidate)
        or _other_direction(baseline, candidate)
        or _wrapped(baseline, candidate)
        or f"Baseline names start with {_first(baseline)}; candidate names with {_first(candidate)}. "
        "If you know which names belong together, pass them with --map."
    )


def _first(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3])


def _other_level(baseline: list[str], candidate: list[str]) -> str:
    left, right = ({level_of(name) for name in names} for names in (baseline, candidate))
    if left & right:
        return ""
    return (
        f"The baseline was captured at level {'+'.join(sorted(left))}, the candidate at level {'+'.join(sorted(right))}. "
        "Capture both with the same --level."
    )


def _other_direction(baseline: list[str], candidate: list[str]) -> str:
    left, right = ({parse_call_name(name).direction or "forward" for name in names} for names in (baseline, candidate))
    if left & right:
        return ""
    return f"The baseline holds only {min(left)} calls, the candidate only {min(right)} calls."


def _wrapped(baseline: list[str], candidate: list[str]) -> str:
    """Return a hint if the module paths of one side are those of the other with a prefix."""
    paths = [dict.fromkeys(_module_paths(names)) for names in (baseline, candidate)]
    for outer, inner in ((0, 1), (1, 0)):
        found: Counter[str] = Counter()
        for path in paths[outer]:
            parts = path.split(".")
            found.update(".".join(parts[:cut]) for cut in range(1, len(parts)) if ".".join(parts[cut:]) in paths[inner])
        prefix, count = found.most_common(1)[0] if found else ("", 0)
        if 2 * count >= min(map(len, paths)) > 0:
            inside = next(path for path in paths[inner] if f"{prefix}.{path}" in paths[outer]).partition(".")[0]
            starts = [f"{prefix}.{inside}", inside]
            last = prefix.rpartition(".")[2]
            return (
                f"Baseline names start with {starts[outer != 0]!r}, candidate names with {starts[outer == 0]!r}. "
                f"One side looks wrapped{_WRAPPERS.get(last, '')}. Try --strip-prefix {prefix}."
            )
    return ""


def _module_paths(names: list[str]) -> Iterable[str]:
    for name in names:
        op = parse_call_name(name).op
        if op.startswith("Module."):
            yield op.removeprefix("Module.")

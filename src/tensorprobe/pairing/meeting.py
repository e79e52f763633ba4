"""Find where the two programs of one step meet again: which pairs of calls hold, and the regions of different calls between them.

In: the calls of one step of both sides, and their alignment. Out: the pairs that are left, the calls without a partner, and the
regions that explain them. Pairs that contradict what the calls are computed from are taken apart, if regions hold both calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorprobe.model import Call
from tensorprobe.pairing.call_pairs import CallPair, StandIn
from tensorprobe.pairing.commuting import commuting_pairs
from tensorprobe.pairing.fused import split_fused
from tensorprobe.pairing.lineage import mismatched_pairs, unlike_pairs
from tensorprobe.pairing.optimizers import pair_optimizers
from tensorprobe.pairing.regions import Region, find_regions
from tensorprobe.pairing.roles import Rename, unify_roles
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Segment

_OPTIMIZER = "Region.optimizer.0"
MOST_CALLS = 200_000
"""Regions are looked for in steps with at most this many calls."""


def meet_again(
    segments: tuple[Segment, Segment],
    entries: tuple[Sequence[Entry], Sequence[Entry]],
    pairs: list[tuple[int, int]],
    alone: tuple[list[int], list[int]],
    renames: tuple[Rename, Rename],
) -> tuple[list[tuple[int, int]], tuple[list[int], list[int]], list[Region]]:
    """Return the pairs, the calls without a partner, and the regions of a step; all its calls are read for that.

    `renames` give modules and parameters of both sides one name.

    Calls with one name and other shapes may be no pair: `div` in the attention of one run, and in the activation of the
    other. They are none if both are in regions.
    """
    if not pairs or max(map(len, entries)) > MOST_CALLS:
        return pairs, alone, []
    held = [{item[0]: item[1] for item in segment.calls() if not isinstance(item, Damage)} for segment in segments]
    ours, theirs = ([calls.get(entry.line) for entry in side] for calls, side in zip(held, entries, strict=True))
    ours, theirs = split_fused(unify_roles((ours, theirs), renames))
    lines = [entry.line for entry in entries[0]]
    step = pair_optimizers((ours, theirs), pairs, alone, f"{_OPTIMIZER}.forward")
    if step is None or len(step.pairs) == 0:
        if not any(alone) and not unlike_pairs((ours, theirs), pairs):
            return pairs, alone, []
        return _meet((ours, theirs), pairs, alone, lines)
    # What stands for the optimizer takes part as pairs of calls at the end: what it reads may come out of a region.
    end, first = (len(ours), len(theirs)), lines[step.members[0][0]]
    before = sum(pair[0] < step.members[0][-1] for pair in step.pairs)
    ours, theirs = [*ours, *(part[0] for part in step.parts)], [*theirs, *(part[1] for part in step.parts)]
    more = [(end[0] + at, end[1] + at) for at in range(len(step.parts))]
    pairs, alone, regions = _meet((ours, theirs), step.pairs + more, step.alone, lines + [first] * len(more))
    pairs = [pair for pair in pairs if pair[0] < end[0]]
    regions = [
        region._replace(pairs=[(min(at, before) if at >= len(pairs) else at, pair) for at, pair in region.pairs])
        for region in regions
    ]
    parts: list[tuple[int, CallPair]] = [(before, StandIn(first, *part)) for part in step.parts]
    regions.append(Region(_OPTIMIZER, step.members, parts))
    return pairs, (sorted(alone[0] + step.members[0]), sorted(alone[1] + step.members[1])), regions


def _meet(
    calls: tuple[list[Call | None], list[Call | None]],
    pairs: list[tuple[int, int]],
    alone: tuple[list[int], list[int]],
    lines: list[int],
) -> tuple[list[tuple[int, int]], tuple[list[int], list[int]], list[Region]]:
    """Find the regions. Pairs of calls that are none are taken apart, if a region holds both."""
    unlike = unlike_pairs(calls, pairs)
    wrong = unlike | mismatched_pairs(calls, pairs, alone, unlike)
    met = _take_apart(calls, pairs, alone, lines, wrong) or (pairs, alone, find_regions(calls, pairs, alone, lines))
    between = commuting_pairs(calls, met[0], [region.members for region in met[2]])
    return _take_apart(calls, met[0], met[1], lines, between) or met


def _take_apart(
    calls: tuple[list[Call | None], list[Call | None]],
    pairs: list[tuple[int, int]],
    alone: tuple[list[int], list[int]],
    lines: list[int],
    wrong: set[tuple[int, int]],
) -> tuple[list[tuple[int, int]], tuple[list[int], list[int]], list[Region]] | None:
    """Return pairs, calls without a partner and regions without the wrong pairs; None where no region holds such a pair."""
    while wrong and len(wrong) < len(pairs):
        left = [pair for pair in pairs if pair not in wrong]
        free = tuple(sorted([*side, *(pair[at] for pair in wrong)]) for at, side in enumerate(alone))
        regions = find_regions(calls, left, (free[0], free[1]), lines)
        inside = [{position for region in regions for position in region.members[at]} for at in (0, 1)]
        held = {pair for pair in wrong if pair[0] in inside[0] and pair[1] in inside[1]}
        if held == wrong:
            return left, (free[0], free[1]), regions
        wrong = held
    return None

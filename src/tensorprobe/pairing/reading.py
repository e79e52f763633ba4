"""The paired calls of two segments, read side by side: each file once from front to back where the order allows it.

In: two segments and an alignment of their index entries. Out: pair by pair, in the baseline's order. Memory stays
bounded: calls that the other side wants later are kept up to `MAX_KEPT`, beyond that they are read again by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tensorprobe.errors import RunDamaged
from tensorprobe.model import Call
from tensorprobe.model.reason import Skipped
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Segment

MAX_KEPT = 20_000
CHUNK = 2048
"""Pairs that are handed on together."""


class CallPair(NamedTuple):
    """Two calls that belong together, and the line of the baseline's."""

    line: int
    baseline: Call
    candidate: Call


def read_in_step(baseline: Segment, candidate: Segment) -> Iterator[list[CallPair] | None]:
    """The pairs of two segments with the same calls in the same order, without their index; None once they are not."""
    chunk: list[CallPair] = []
    ours, theirs = baseline.calls(), candidate.calls()
    for left in ours:
        right = next(theirs, None)
        if right is None or isinstance(left, Damage) or isinstance(right, Damage):
            yield None
            return
        one, other = left[1], right[1]
        if one.name != other.name or one.repeat != other.repeat:
            yield None
            return
        chunk.append(CallPair(left[0], one, other))
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    yield chunk if next(theirs, None) is None else None


def read_pairs(
    segments: tuple[Segment, Segment],
    entries: tuple[Sequence[Entry], Sequence[Entry]],
    pairs: Sequence[tuple[int, int]],
) -> Iterator[CallPair | Skipped]:
    """Each pair; or, in its place, why one of its lines cannot be read."""
    readers = [
        _Reader(segment, entries_of_side, [pair[side] for pair in pairs])
        for side, (segment, entries_of_side) in enumerate(zip(segments, entries, strict=True))
    ]
    for ours, theirs in pairs:
        baseline, candidate = readers[0].get(ours), readers[1].get(theirs)
        if isinstance(baseline, Skipped):
            yield baseline
        elif isinstance(candidate, Skipped):
            yield candidate
        else:
            yield CallPair(entries[0][ours].line, baseline, candidate)


class _Reader:
    """One side: goes forward through the file, keeps what it passes and will be asked for."""

    def __init__(self, segment: Segment, entries: Sequence[Entry], wanted: list[int]) -> None:
        self._segment = segment
        self._entries = entries
        self._calls = segment.calls()
        self._next = 0
        self._kept: dict[int, Call | Skipped] = {}
        # When positions only go up, as they nearly always do, nothing passed is asked for again.
        rising = all(one < other for one, other in pairwise(wanted))
        self._wanted: set[int] = set() if rising else {entries[position].line for position in wanted}

    def get(self, position: int) -> Call | Skipped:
        entry = self._entries[position]
        if entry.line in self._kept:
            return self._kept.pop(entry.line)
        while self._next <= entry.line:
            item = next(self._calls, None)
            if item is None:
                return Skipped.FILE_SHORTENED
            line, call = (item.line - 1, Skipped.DAMAGED_LINE) if isinstance(item, Damage) else item
            self._next = line + 1
            if line == entry.line:
                return call
            if line in self._wanted and len(self._kept) < MAX_KEPT:
                self._kept[line] = call
        return self._read_alone(entry)

    def _read_alone(self, entry: Entry) -> Call | Skipped:
        try:
            return self._segment.call_at(entry)
        except RunDamaged:
            return Skipped.DAMAGED_LINE

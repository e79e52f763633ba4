"""Finds calls of a step by name, and reads tensors again to answer what the judge asks: how a parameter was updated.

In: the two runs, and where the steps stand in them. Out: figures by row. What cannot be read has no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from tensorprobe.errors import RunDamaged, TensorDamaged
from tensorprobe.model.dtypes import EPS
from tensorprobe.model.measured import Measured, Opinions, Update
from tensorprobe.pairing.diff import MOST_UPDATED, measure_update
from tensorprobe.pairing.measure import SegmentPair
from tensorprobe.record.elements import widen
from tensorprobe.record.reader import NativeSegment
from tensorprobe.record.run import Entry, Run
from tensorprobe.record.stored import StoredCall

Array = numpy.ndarray[Any, Any]


class CallFinder:
    """Finds calls of one rank in one step by their name; the index is read when it is first needed."""

    def __init__(self, run: Run, step: int, rank: int) -> None:
        self.run, self.step, self.rank = run, step, rank
        self._entries: dict[tuple[str, int], Entry] | None = None

    def entry(self, name: str, repeat: int = 0) -> Entry | None:
        """Return where a call stands."""
        if self._entries is None:
            entries = self.run.segment(self.step, self.rank).index().entries
            self._entries = {(entry.name, entry.repeat): entry for entry in reversed(entries)}
        return self._entries.get((name, repeat))

    def find(self, name: str, repeat: int = 0, *, line: int | None = None) -> StoredCall | None:
        """Return a call; None where there is none, or its line is damaged. `line` is where it stands in all likelihood."""
        if line is not None and (found := self._on_line(Entry(line, name, repeat))) is not None:
            return found
        entry = self.entry(name, repeat)
        return None if entry is None else self._at(entry)

    def _on_line(self, entry: Entry) -> StoredCall | None:
        """Return the call of an entry if it stands there and no index is needed to read it."""
        segment = self.run.segment(self.step, self.rank)
        if not isinstance(segment, NativeSegment) or not segment.knows(entry.line):
            return None
        found = self._at(entry)
        return found if found is not None and (found.name, found.repeat) == entry[1:] else None

    def _at(self, entry: Entry) -> StoredCall | None:
        try:
            return self.run.at(self.step, self.rank, entry)
        except RunDamaged:
            return None

    def values(self, name: str, repeat: int, slot: str) -> Array | None:
        """Return the values of a slot, of a large one the first; None where they were not recorded or cannot be read.

        Complex numbers are pairs of numbers.
        """
        call = self.find(name, repeat)
        found = None if call is None else next((each for each in call.slots if each.name == slot), None)
        try:
            if found is None or not found.has_data:
                return None
            held = found.stored()
            first = widen(held.reshape(-1)[:MOST_UPDATED] if held.size > MOST_UPDATED else held, found.dtype)
            return numpy.stack((first.real, first.imag)) if first.dtype.kind == "c" else first
        except (RunDamaged, TensorDamaged):
            return None


Finders = tuple[CallFinder, CallFinder]


def finders_of(runs: tuple[Run, Run], place: SegmentPair) -> Finders:
    """Return the finders of both sides of a step."""
    return (
        CallFinder(runs[0], place.step, place.rank),
        CallFinder(runs[1], place.candidate_step, place.candidate_rank),
    )


def measure_updates(
    measured: Measured, opinions: Opinions, before: Finders | None, now: Finders
) -> dict[int, Update | None]:
    """Answer the questions of the judge: how tensors have changed since the step before."""
    calls, rows = measured.calls, measured.rows
    found: dict[int, Update | None] = {}
    for row, call, gradients in opinions.questions:
        names = (calls.name[call], calls.candidate[call])
        values = [
            finder.values(name, calls.repeat[call], rows.slot[row])
            for finders in (before, now)
            for finder, name in zip(finders or (), names, strict=finders is not None)
        ]
        known = [each for each in values if each is not None and each.dtype.kind == "f"]
        alike = len(known) == 4 and len({each.shape for each in known}) == 1
        eps = max(EPS.get(dtypes[row], 0.0) for dtypes in rows.dtype_names)
        found[row] = None
        if alike and before is not None:
            noise = _sums(before, gradients, known[0].shape)
            found[row] = measure_update((known[0], known[1]), (known[2], known[3]), eps, noise)
    return found


def _sums(
    before: Finders, gradients: Sequence[tuple[str, str, int, str]], shape: tuple[int, ...]
) -> tuple[Array, Array] | None:
    """Return the gradients of a parameter on both sides, added up; None where they are not all known."""
    sides = []
    for side, finder in enumerate(before):
        parts = [finder.values((name, partner)[side], repeat, slot) for name, partner, repeat, slot in gradients]
        known = [part.astype(numpy.float64) for part in parts if part is not None and part.shape == shape]
        if not known or len(known) < len(parts):
            return None
        sides.append(numpy.sum(known, axis=0))
    return sides[0], sides[1]

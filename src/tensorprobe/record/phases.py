"""A run with the calls of some phases only. The others are counted, and keep their lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

from tensorprobe.errors import NotFound
from tensorprobe.model.call import Call, phase_in
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Index, Run, Segment


def of_phases(run: Run, phases: Collection[str] | None) -> Run:
    """Return the run with the calls of these phases; the run itself when there are none to choose."""
    if not phases:
        return run
    held: dict[tuple[int, int], Segment] = {place: _OfPhases(run.segment(*place), phases) for place in run.segments()}
    chosen = Run(run.path, run.manifest, run.parts, held, data=run.data, one_rank=run.one_rank)
    chosen.true_rank, chosen.true_step = run.true_rank, run.true_step
    return chosen


def demand_calls(run: Run, phases: Collection[str] | None) -> None:
    """Raise NotFound unless a run of `of_phases` has calls in one of its steps. It says which phases the run has."""
    if not phases or any(run.segment(*place).index().entries for place in run.segments()):
        return
    found: set[str] = set()
    for place in run.segments():
        found |= run.segment(*place).others  # type: ignore[attr-defined]
    has = f"It has {', '.join(sorted(found))}." if found else "It records no phases."
    raise NotFound(f"no call of phase {', '.join(phases)} in '{run.path}'. {has}")


def left_out(run: Run, step: int, rank: int) -> int:
    """Return how many calls of a step are in other phases."""
    held = run.segment(step, rank)
    return held.left_out if isinstance(held, _OfPhases) else 0


class _OfPhases:
    """A segment without the calls of other phases."""

    def __init__(self, held: Segment, phases: Collection[str]) -> None:
        self._held, self._phases = held, phases
        self.others: set[str] = set()
        """The other phases that it has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    @cached_property
    def left_out(self) -> int:
        """How many calls are in other phases."""
        return len(self._held.index().entries) - len(self.index().entries)

    @cached_property
    def _index(self) -> Index:
        lines = {item[0] for item in self.calls() if not isinstance(item, Damage)}
        entries, damage = self._held.index()
        return Index([entry for entry in entries if entry.line in lines], damage)

    def index(self) -> Index:
        """Return the index of the calls that are left."""
        return self._index

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Yield the calls that are left, each with the line that it has in the whole segment."""
        for item in self._held.calls():
            if isinstance(item, Damage) or phase_in(item[1].phase, self._phases):
                yield item
            elif phase := item[1].phase.partition(",")[0]:
                self.others.add(phase)

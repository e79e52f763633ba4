"""A run, whatever its layout on disk: steps, ranks, calls in execution order, coverage.

In: the manifest, the parts of the ranks, and one `Segment` for each step and rank (a layout's reader makes them).
Out: calls, one by one, without their values. A `Run` shows the folder as it was when it was opened; open it again to see
what was added. It imports neither torch nor numpy, and reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from tensorprobe.errors import NotFound, RunDamaged, nearest
from tensorprobe.model import Call, Coverage, Manifest, RankPart, Stack
from tensorprobe.record.blob import ByteSource
from tensorprobe.record.lines import Damage
from tensorprobe.record.names import MODULE, is_inside, is_op, name_fits
from tensorprobe.record.stored import StoredCall
from tensorprobe.text import counted, ranges

OnDamage = Literal["raise", "skip"]
"""At a damaged line: raise RunDamaged after the calls before it, or continue with the calls after it."""

_NUMBERED = re.compile(r"\.[0-9]+(\.(forward|backward))?$")


class Entry(NamedTuple):
    """One call in the index: its zero-based line, its name, and how often it was recorded before."""

    line: int
    name: str
    repeat: int


class Index(NamedTuple):
    """The calls of one rank in one step, in execution order, and the lines that cannot be indexed."""

    entries: Sequence[Entry]
    damage: Sequence[Damage]


class Segment(Protocol):
    """The calls of one rank in one step, as the reader of a layout returns them."""

    @property
    def source(self) -> ByteSource:
        """Where the values come from."""
        ...

    def index(self) -> Index:
        """Return the index, which is read once."""
        ...

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Yield each call with its zero-based line, or a Damage for a line that cannot be read."""
        ...

    def call_at(self, entry: Entry) -> Call:
        """Return the call of an index entry; raise RunDamaged when its line breaks the format."""
        ...

    def stack(self, number: int) -> Stack | None:
        """Return the stack with that id; None when the segment does not hold it."""
        ...

    def damage(self) -> Sequence[Damage]:
        """Return every line that cannot be read."""
        ...

    def size_bytes(self) -> int:
        """Return the size of the stored values on disk."""
        ...


class Run:
    """A recorded execution, open for reading."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        parts: Mapping[int, RankPart],
        segments: Mapping[tuple[int, int], Segment],
        *,
        data: Path | None = None,
        one_rank: bool = False,
    ) -> None:
        self.path = path
        self.data = data
        """Where the values are, when they are not where the layout has them: `open_run(path, data)` opens the same."""
        self.one_rank = one_rank
        """Whether the path names one rank of a dump, so that its number need not be that of the rank it is compared with."""
        self.true_rank: int | None = None
        """The number of the rank on disk, if this run uses another number for it."""
        self.true_step: int | None = None
        """The number of the step on disk, if this run uses another number for it."""
        self.manifest = manifest
        self.parts = dict(sorted(parts.items()))
        self._segments = dict(sorted(segments.items()))

    def __repr__(self) -> str:
        return f"<run '{self.path}': {counted(len(self.steps), 'step')}, {counted(len(self.ranks), 'rank')}>"

    def renumbered(self, rank: int, step: int | None = None) -> Run:
        """Return this run with its only rank, and optionally its only step, renumbered, to compare it with another rank or step."""
        if len(self.ranks) != 1 or (step is not None and len(self.steps) != 1):
            raise NotFound(
                f"'{self.path}' has {len(self.ranks)} ranks, {len(self.steps)} steps; expected one of each to renumber."
            )
        (own,) = self.ranks
        steps = {held: held if step is None else step for held in self.steps}
        parts = {}
        if own in self.parts:
            part = self.parts[own]
            own_steps = [steps.get(held, held) for held in part.steps]
            parts[rank] = msgspec.structs.replace(part, rank=rank, steps=own_steps)
        segments = {(steps[held], rank): segment for (held, _), segment in self._segments.items()}
        run = Run(self.path, self.manifest, parts, segments, data=self.data, one_rank=self.one_rank)
        run.true_rank = own if self.true_rank is None else self.true_rank
        run.true_step = self.true_step if step is None or self.true_step is not None else self.steps[0]
        return run

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have a part or a call, sorted."""
        return sorted({*self.parts, *(rank for _, rank in self._segments)})

    @cached_property
    def steps(self) -> list[int]:
        """Every step that some rank has a folder for, sorted."""
        return sorted({step for step, _ in self._segments})

    @property
    def closed(self) -> bool:
        """Whether every rank finished its part; False when a recording process was killed or is still running."""
        return bool(self.parts) and all(part.closed for part in self.parts.values())

    @property
    def coverage(self) -> dict[int, Coverage]:
        """The coverage of each rank: what it saw, and how much of that was recorded."""
        return {rank: part.coverage for rank, part in self.parts.items()}

    def segments(self, step: int | None = None, rank: int | None = None) -> list[tuple[int, int]]:
        """Return the (step, rank) pairs of the run, in order; raise NotFound when none matches."""
        if (step, rank) in self._segments:
            return [(step, rank)]  # type: ignore[list-item]
        for kind, asked, held in (("step", step, self.steps), ("rank", rank, self.ranks)):
            if asked is not None and asked not in held:
                raise NotFound(f"no {kind} {asked} in '{self.path}'. It holds {kind}s {ranges(held) or '(none)'}.")
        chosen = [key for key in self._segments if step in (None, key[0]) and rank in (None, key[1])]
        if not chosen and step is not None and rank is not None:
            raise NotFound(f"rank {rank} recorded nothing in step {step} of '{self.path}'.")
        return chosen

    def segment(self, step: int, rank: int) -> Segment:
        """Return the segment of one rank in one step."""
        found = self._segments.get((step, rank))
        return self._segments[self.segments(step, rank)[0]] if found is None else found

    def calls(
        self,
        step: int | None = None,
        rank: int | None = None,
        *,
        op: str | None = None,
        module: str | None = None,
        on_damage: OnDamage = "raise",
    ) -> Iterator[StoredCall]:
        """Yield the calls in execution order; within a step, rank after rank.

        `op` and `module` are globs: `op="linear"` for every `Functional.linear`, `module="layers.*"`.
        At a damaged line, RunDamaged is raised after the calls before it. With `on_damage="skip"` reading continues
        after the line, and `damage` returns what was skipped.
        """
        for at_step, at_rank in self.segments(step, rank):
            segment = self._segments[at_step, at_rank]
            source = segment.source
            for item in segment.calls():
                if isinstance(item, Damage):
                    if on_damage == "raise":
                        raise self._damaged(item)
                    continue
                index, call = item
                if op is not None and not is_op(call.name, op):
                    continue
                if module is not None and not is_inside(call.module, module):
                    continue
                yield StoredCall(call, step=at_step, rank=at_rank, index=index, run=self.path, source=source)

    def names(self, step: int, rank: int, *, on_damage: OnDamage = "raise") -> list[str]:
        """Return the names of the calls of one rank in one step, from the index: no call is decoded."""
        index = self.segment(step, rank).index()
        if on_damage == "raise" and index.damage:
            raise self._damaged(index.damage[0])
        return [entry.name for entry in index.entries]

    def damage(self, step: int, rank: int) -> list[Damage]:
        """Return every damaged line of one rank in one step; this reads the whole segment."""
        return list(self.segment(step, rank).damage())

    def find(
        self, name: str, *, step: int | None = None, rank: int | None = None, repeat: int | None = None
    ) -> list[StoredCall]:
        """Return the calls that `name` stands for (`record.names`), in the first step and rank that has any.

        `Functional.conv2d.1` finds its forward and its backward, `Functional.conv2d` finds every call of the op, a module
        path what was called in it. Raises NotFound with the nearest names.
        """
        chosen = self.segments(step, rank)
        for matches in (self._named, self._made_in):
            for place in chosen:
                entries = [entry for entry in matches(place, name) if repeat in (None, entry.repeat)]
                if entries:
                    return [self.at(*place, entry) for entry in entries]
        raise self._unknown_call(name, chosen, repeat)

    def at(self, step: int, rank: int, entry: Entry) -> StoredCall:
        """Return the call of an index entry; raise RunDamaged when its line breaks the format."""
        segment = self.segment(step, rank)
        return StoredCall(
            segment.call_at(entry), step=step, rank=rank, index=entry.line, run=self.path, source=segment.source
        )

    def _named(self, place: tuple[int, int], name: str) -> list[Entry]:
        return [] if name.startswith(MODULE) else matching(self._segments[place].index().entries, name)

    def _made_in(self, place: tuple[int, int], name: str) -> list[Entry]:
        """Return the calls that were made in a module."""
        wanted, segment = name.removeprefix(MODULE), self._segments[place]
        lines = {
            item[0] for item in segment.calls() if not isinstance(item, Damage) and is_inside(item[1].module, wanted)
        }
        return [entry for entry in segment.index().entries if entry.line in lines] if lines else []

    def call(self, name: str, step: int | None = None, rank: int | None = None, repeat: int = 0) -> StoredCall:
        """Return the first call that `find` finds: the forward one, if the name has no direction."""
        return self.find(name, step=step, rank=rank, repeat=repeat)[0]

    def stack(self, call: StoredCall) -> Stack | None:
        """Return the stack of the call in the user's program; None when none was recorded."""
        return None if call.stack is None else self.segment(call.step, call.rank).stack(call.stack)

    def _damaged(self, damage: Damage) -> RunDamaged:
        return RunDamaged(
            f"'{self.path}' is damaged at {damage}.\n"
            "  The calls before it are readable; on_damage='skip' reads those after it too."
        )

    def _unknown_call(self, name: str, chosen: list[tuple[int, int]], repeat: int | None) -> NotFound:
        known = {entry.name: None for key in chosen[:4] for entry in self._segments[key].index().entries}
        if repeat is not None and any(known_name == name or known_name.startswith(name + ".") for known_name in known):
            return NotFound(f"{name} has no repeat {repeat} in '{self.path}'.")
        bare = {_NUMBERED.sub("", known_name): None for known_name in known}
        close = [*dict.fromkeys((*nearest(name, known), *nearest(_NUMBERED.sub("", name), bare)))]
        close = (
            close or [each for each in bare if name.lower() in each.lower()][:3]
        )  # `linear` is in `Functional.linear`
        hint = f"Nearest: {', '.join(close)}" if close else f"List them: tensorprobe inspect {self.path} --step 0"
        return NotFound(f"no call {name!r} in '{self.path}' ({_place(chosen)}).\n  {hint}")


def matching(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries with exactly this name, else those that it is the start or a glob of."""
    exact = [entry for entry in entries if entry.name == name]
    return exact or [entry for entry in entries if name_fits(entry.name, name)]


def _place(chosen: Sequence[tuple[int, int]]) -> str:
    if not chosen:
        return "it holds no calls"
    steps, ranks = (ranges(sorted({key[at] for key in chosen})) for at in (0, 1))
    return f"step {steps}, rank {ranks}"

"""The lines of one dump, in execution order: what a result table says of each tensor besides its errors.

In: one rank of a run, and how a tool spells it. Out: columns as lists. Nothing here reads a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.msprobe_segment import MsprobeSegment
from tensorprobe.model import Call, Slot, Stack
from tensorprobe.record import Damage, Run
from tensorprobe.record.run import Segment

Statistics = tuple[float, ...]
Spelled = tuple[str, str, str, Statistics | None]
"""Name, dtype, shape and statistics of a tensor, as the tool has them."""
Spell = Callable[[Call], list[Spelled]]
Key = tuple[str, int, str]
"""Call, how often it had been recorded before, slot: what a row of a comparison says of itself."""


@dataclass
class Lines:
    """Columns with an entry for each tensor. `call` counts the calls of the dump."""

    key: list[Key] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    shape: list[str] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    statistics: list[Statistics | None] = field(default_factory=list)
    """max, min, mean and whatever else the tool has; None where the dump does not say."""
    digest: list[str | None] = field(default_factory=list)
    file: list[str] = field(default_factory=list)
    """The file with the values, where the dump has one for each tensor and names it; else empty."""
    has_values: list[bool] = field(default_factory=list)
    stack: list[int | None] = field(default_factory=list)
    damaged: int = 0
    """How many lines cannot be read."""

    def __len__(self) -> int:
        return len(self.key)


def read_lines(run: Run, step: int, rank: int, spell_for: Callable[[Segment], Spell]) -> Lines:
    """Every tensor that the run has for that step and rank."""
    segment = run.segment(step, rank)
    spell, file_of = spell_for(segment), _file_names(segment)
    lines = Lines()
    sizes: dict[tuple[int, ...], int] = {}
    for number, item in enumerate(segment.calls()):
        if isinstance(item, Damage):
            lines.damaged += 1
            continue
        call = item[1]
        for slot, (name, dtype, shape, statistics) in zip(call.slots, spell(call), strict=True):
            lines.key.append((call.name, call.repeat, slot.name))
            lines.call.append(number)
            lines.name.append(name)
            lines.dtype.append(dtype)
            lines.shape.append(shape)
            if slot.shape not in sizes:
                sizes[slot.shape] = slot.count
            lines.elements.append(sizes[slot.shape])
            lines.statistics.append(statistics)
            lines.digest.append(slot.digest)
            lines.file.append(file_of(slot))
            lines.has_values.append(slot.has_data)
            lines.stack.append(call.stack)
    return lines


def _file_names(segment: Segment) -> Callable[[Slot], str]:
    if not isinstance(segment, MsprobeSegment):
        return lambda _: ""
    return lambda slot: "" if slot.offset is None else segment.file_of(slot.offset)


class StackTexts:
    """The stacks of a segment, each worded once: innermost frame first."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._known: dict[int, str] = {}

    def of(self, _: str, number: int | None) -> str:
        """The stack of a call by its number, on one line; empty when there is none."""
        if number is None:
            return ""
        if number not in self._known:
            try:
                stack: Stack | None = self._segment.stack(number)
            except RunDamaged as damage:
                self._known[number] = f"damaged: {damage}"
            else:
                self._known[number] = " <- ".join(map(str, stack.frames)) if stack is not None else ""
        return self._known[number]

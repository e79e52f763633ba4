"""How one of the older tools writes a result: its columns, its words, its rule; and the table that comes of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.dump_files import leaves_in, numbers_in
from tensorprobe.legacy.layouts.msprobe_reader import MsprobeSegment
from tensorprobe.model import Call, Slot, Stack
from tensorprobe.pairing.call_pairs import against, why_alone
from tensorprobe.record import Damage, Run
from tensorprobe.record.run import Entry, Segment

if TYPE_CHECKING:
    from tensorprobe.legacy.compared.paired import Paired


NAMES = ("NPU Name", "Bench Name")
MESSAGE = "Err_message"
STACK_COLUMN = "NPU_Stack_Info"
BLIND_TO_SCALE = "The rule is blind to scale (a tensor times 1.01 passes); to judge each op by its own rounding"
NOTHING = "N/A"
UNMATCHED = "Unmatched"
BY_VALUES = ("values", "digest")
"""Bases of a row whose figures come from all elements."""
StackOf = Callable[[str, int | None], str]
"""Call and number of its stack → the stack in words, empty when there is none."""
Columns = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class TableStyle:
    """What is the tool's own."""

    logger: logging.Logger
    policy: str
    """By which the engine judges."""
    rule: str
    """What that means, for somebody who reads that nothing failed."""
    blindness: str
    """What the rule does not see, and what the command behind this sentence is good for."""
    verdict: str
    """The title of the column with the results."""
    good: str
    bad: tuple[str, ...]
    """What stands there for a row that passes, and for one that fails."""
    figures: Collection[str]
    """Titles of columns with numbers and our own words; nothing in them comes from a dump."""
    logged: tuple[str, ...]
    """Titles of columns that a line of the log says of its row."""
    spell: Spell
    lay_out: Callable[[Paired, StackOf | None], Columns]
    bases: Sequence[str] = BY_VALUES
    files: str = ".npy"
    """What the files with values are called."""
    numbers: bool = False
    """Whether numbers among the arguments have rows of their own."""
    whole_calls: bool = False
    """Whether a call of which a tensor has no partner, or another shape, is unmatched with all its tensors."""

    @property
    def results(self) -> dict[str, str]:
        """Every result a row can have, and how it is spoken of."""
        own = {word: word for word in (self.good, *self.bad, UNMATCHED)}
        return {**own, NOTHING: f"not measured ({NOTHING})"}


@dataclass
class Table:
    """A finished table."""

    style: TableStyle
    paired: Paired
    columns: Columns

    def __len__(self) -> int:
        return len(self.paired)

    def find(self, *results: str) -> Any:
        """The rows with one of these results, from 0; in an editor, where the header is line 1, row 0 is line 2."""
        return numpy.flatnonzero(numpy.isin(numpy.array(self.columns[self.style.verdict], dtype=object), results))

    def name(self, row: int) -> str:
        """The name of the row's line: the NPU's, or the bench's where only that has one. As the dump has it."""
        held: str = self.columns[NAMES[bool(self.paired.at[0][row] < 0)]][row]
        return held


Statistics = tuple[float, ...]
Spelled = tuple[str, str, str, Statistics | None]
"""Name, dtype, shape and statistics of a tensor, as the tool has them."""
Spell = Callable[[Call], list[Spelled]]
Key = tuple[str, int, str]
"""Call, how often it had been recorded before, slot: what a row of a comparison says of itself."""


_NOT_MEANT = ("output.node.", "output.place.")
"""Slots of gradients that are not those of the call's arguments."""


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
    excuse: list[str] = field(default_factory=list)
    """Why the other dump may have nothing that this line can be compared with; mostly empty."""
    excuse_of: Callable[[str, int], str] = lambda name, repeat: ""
    """The same of a whole call, by its name and how often it had been recorded before."""
    number: list[Any] = field(default_factory=list)
    """A number among the arguments; None for a tensor."""
    damaged: int = 0
    """How many lines cannot be read."""
    later_digests: bool = False
    """Whether the tool took digests after the call, when the tensor may have been changed."""

    def __len__(self) -> int:
        return len(self.key)

    def add(self, number: int, call: Call, spell: Spell, file_of: Callable[[int], str] | None, numbers: bool) -> None:
        """Add the tensors of a call, and with `numbers` the numbers among its arguments, in the order of the arguments.

        `file_of` gives the name of the file with the values at an offset.
        """
        spelled = dict(zip((slot.name for slot in call.slots), zip(call.slots, spell(call), strict=True), strict=True))
        order = {**dict.fromkeys(place for place, _ in leaves_in(call.args, call.kwargs)), **spelled}
        values = dict(numbers_in(call.args, call.kwargs)) if numbers and call.direction == "forward" else {}
        for place in order if values else spelled:
            if place in spelled:
                self._add_tensor(number, call, *spelled[place], file_of)
            elif place in values:
                self._add_number(number, call, place, values[place])

    def _add_number(self, number: int, call: Call, place: str, value: Any) -> None:
        self.key.append((call.name, call.repeat, place))
        self.call.append(number)
        self.name.append(f"{call.name}.{place.replace('input.kwargs.', 'input.', 1)}")
        self.dtype.append(str(type(value)))
        self.shape.append("[]")
        self.elements.append(1)
        self.statistics.append((value, value, value, value, 0))
        self.digest.append(None)
        self.file.append("")
        self.has_values.append(True)
        self.stack.append(call.stack)
        self.excuse.append("")
        self.number.append(value)

    def _add_tensor(
        self,
        number: int,
        call: Call,
        slot: Slot,
        spelled: Spelled,
        file_of: Callable[[int], str] | None,
    ) -> None:
        name, dtype, shape, statistics = spelled
        self.key.append((call.name, call.repeat, slot.name))
        self.call.append(number)
        self.name.append(name)
        self.dtype.append(dtype)
        self.shape.append(shape)
        self.elements.append(slot.count)
        self.statistics.append(statistics)
        self.digest.append(slot.digest)
        self.file.append("" if file_of is None or slot.offset is None else file_of(slot.offset))
        self.has_values.append(slot.has_data)
        self.stack.append(call.stack)
        is_place = not slot.dtype or slot.name.startswith(_NOT_MEANT)
        self.excuse.append((slot.skipped or "") if is_place else "")
        self.number.append(None)


@dataclass
class _Listing:
    """What the copies of a listed segment share: the lines, once they are read, and what it is compared with."""

    lines: Lines | None = None
    other: Segment | None = None


class ListedSegment:
    """A segment that notes its lines while the comparison reads it, so that the table need not read it again.

    Copies share the lines: the comparison works on a copy.
    """

    def __init__(self, segment: Segment, style: TableStyle, listing: _Listing | None = None) -> None:
        self._segment, self._style, self._listing = segment, style, listing or _Listing()
        self._entries: dict[tuple[str, int], Entry] = {}

    def __copy__(self) -> ListedSegment:
        return ListedSegment(copy(self._segment), self._style, self._listing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._segment, name)

    def against(self, other: Segment) -> ListedSegment:
        """As it is compared with another; what is listed is what was compared."""
        inner = other._segment if isinstance(other, ListedSegment) else other
        self._listing.other = against(inner, self._segment)
        return ListedSegment(against(self._segment, inner), self._style, self._listing)

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Each call, as the segment gives it."""
        segment, style = self._segment, self._style
        file_of = segment.file_of if isinstance(segment, MsprobeSegment) else None
        later = isinstance(segment, MsprobeSegment) and segment.is_published
        lines = Lines(later_digests=later, excuse_of=self._excuse)
        for number, item in enumerate(segment.calls()):
            if isinstance(item, Damage):
                lines.damaged += 1
            else:
                lines.add(number, item[1], style.spell, file_of, style.numbers)
            yield item
        self._listing.lines = lines

    def _excuse(self, name: str, repeat: int) -> str:
        """Why the other dump need not have such a call; empty if it must."""
        segment, other = self._segment, self._listing.other
        if other is None:
            return ""
        if not self._entries:
            self._entries = {(entry.name, entry.repeat): entry for entry in segment.index().entries}
        return why_alone(segment.call_at(self._entries[name, repeat]), segment, other) or ""

    def lines(self) -> Lines:
        """Return every tensor. The segment is read now if nobody has read all of it before."""
        if self._listing.lines is None:
            deque(self.calls(), maxlen=0)
        assert self._listing.lines is not None
        return self._listing.lines


def listed(run: Run, style: TableStyle) -> Run:
    """Return the run with segments that note their lines."""
    segments = {key: cast(Segment, ListedSegment(run.segment(*key), style)) for key in run.segments()}
    return Run(run.path, run.manifest, run.parts, segments, data=run.data, one_rank=run.one_rank)


def read_lines(segment: Segment, other: Segment) -> Lines:
    """Return every tensor of a segment of a listed run, as it is compared with another."""
    return cast(ListedSegment, against(segment, other)).lines()


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

"""How one of the older tools writes a result: its columns, its words, its rule; and the table that comes of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.msprobe_reader import MsprobeSegment
from tensorprobe.model import Call, Stack
from tensorprobe.record import Damage, Run
from tensorprobe.record.run import Segment

if TYPE_CHECKING:
    import pyarrow as pa


NAMES = ("NPU Name", "Bench Name")
MESSAGE = "Err_message"
STACK_COLUMN = "NPU_Stack_Info"
BLIND_TO_SCALE = "The rule is blind to scale (a tensor times 1.01 passes); to judge each op by its own rounding"
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

    def add(self, number: int, call: Call, spell: Spell, file_of: Callable[[int], str] | None) -> None:
        """Add the tensors of a call. `file_of` gives the name of the file with the values at an offset."""
        for slot, (name, dtype, shape, statistics) in zip(call.slots, spell(call), strict=True):
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


class ListedSegment:
    """A segment that notes its lines while the comparison reads it, so that the table need not read it again.

    Copies share the lines: the comparison works on a copy.
    """

    def __init__(self, segment: Segment, spell: Spell, read: list[Lines] | None = None) -> None:
        self._segment, self._spell = segment, spell
        self._read: list[Lines] = [] if read is None else read

    def __copy__(self) -> ListedSegment:
        return ListedSegment(copy(self._segment), self._spell, self._read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._segment, name)

    def calls(self) -> Iterator[tuple[int, Call] | Damage]:
        """Each call, as the segment gives it."""
        file_of = self._segment.file_of if isinstance(self._segment, MsprobeSegment) else None
        lines = Lines()
        for number, item in enumerate(self._segment.calls()):
            if isinstance(item, Damage):
                lines.damaged += 1
            else:
                lines.add(number, item[1], self._spell, file_of)
            yield item
        self._read[:] = [lines]

    def lines(self) -> Lines:
        """Return every tensor. The segment is read now if nobody has read all of it before."""
        if not self._read:
            deque(self.calls(), maxlen=0)
        return self._read[0]


def listed(run: Run, spell: Spell) -> Run:
    """Return the run with segments that note their lines."""
    segments = {key: cast(Segment, ListedSegment(run.segment(*key), spell)) for key in run.segments()}
    return Run(run.path, run.manifest, run.parts, segments, data=run.data, one_rank=run.one_rank)


def read_lines(run: Run, step: int, rank: int) -> Lines:
    """Return every tensor that a listed run has for that step and rank."""
    return cast(ListedSegment, run.segment(step, rank)).lines()


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


Array = numpy.ndarray[Any, Any]
NOTHING = "N/A"
UNMATCHED = "Unmatched"


class Paired:
    """Rows of a table in the making; `at` has the positions of the lines of NPU and bench, -1 where a side has none.

    `bases` are those of the comparison's bases that count as measured. `files` is what files with values are called.
    `remarks` are sentences on calls of the bench, for the first row of each.
    """

    def __init__(
        self,
        npu: Lines,
        bench: Lines,
        rows: pa.Table,
        *,
        bases: Sequence[str] = BY_VALUES,
        files: str = ".npy",
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        self.npu, self.bench = npu, bench
        at_npu, at_bench, self._row_of = _order(npu, bench, *_partners(npu, bench, rows))
        self.at = (at_npu, at_bench)
        self._rows, self._files, self._remarks = rows, files, dict(remarks or {})
        self.paired = self._row_of >= 0
        self.other_shape = self.paired & (self.text("baseline_shape") != self.text("candidate_shape"))
        basis = self.text("basis")
        self.measured = self.paired & ~self.other_shape & numpy.isin(basis, bases)
        by_values = self.measured & numpy.isin(basis, BY_VALUES)
        elements = _pick(npu.elements, at_npu)
        elements[at_npu < 0] = 0
        self._empty = by_values & (elements == 0).astype(bool)
        count = self.column("count", missing=0)
        self._lost = numpy.where(by_values, elements - count, 0)
        """Elements that are NaN or infinite on a side."""
        self.strange = numpy.where(by_values, self.column("nonfinite_different", missing=0), 0)
        """Of those, the ones that are not the same on both."""
        self._without_figures = (self._lost > 0).astype(bool) & (count == 0)
        self._hollow = self._without_figures & (self.strange == 0)
        """Nothing but NaN and infinities, all alike: that is no measurement."""

    def __len__(self) -> int:
        return len(self._row_of)

    def column(self, name: str, missing: float = numpy.nan) -> Array:
        """A column of numbers of the comparison; `missing` where a row has no partner."""
        held = self._rows.column(name).to_numpy()
        return numpy.append(held, numpy.array(missing, dtype=held.dtype))[self._row_of]

    def text(self, name: str) -> Array:
        """A column of texts of the comparison; empty where a row has no partner."""
        held = numpy.empty(self._rows.num_rows + 1, dtype=object)
        held[:-1], held[-1] = self._rows.column(name).cast("string").to_pylist(), ""
        return held[self._row_of]

    def both(self, title: str, values: Callable[[Lines], Sequence[Any]]) -> dict[str, list[Any]]:
        """What the lines of each side say, as two columns: `NPU …`, `Bench …`; `N/A` where a side has none."""
        sides = zip(("NPU", "Bench"), (self.npu, self.bench), self.at, strict=True)
        return {f"{who} {title}": _pick(values(lines), at).tolist() for who, lines, at in sides}

    def stacks(self, stack: StackOf) -> list[str]:
        """The stack of each line of the NPU."""
        texts = [stack(key[0], number) or NOTHING for key, number in zip(self.npu.key, self.npu.stack, strict=True)]
        found: list[str] = _pick(texts, self.at[0]).tolist()
        return found

    def shown(self, figures: Array) -> list[Any]:
        """The figures, `N/A` where nothing was measured."""
        held = figures.astype(object)
        held[~self.measured | self._without_figures] = NOTHING
        shown: list[Any] = held.tolist()
        return shown

    def accuracy(self, words: Mapping[str, str]) -> Array:
        """The verdict in the tool's words: only ever that of `agrees` for what was measured."""
        verdict = self.text("verdict")
        accuracy = numpy.full(len(verdict), NOTHING, dtype=object)
        for held, shown in words.items():
            accuracy[verdict == held] = shown
        accuracy[(verdict == "agrees") & (~self.measured | self._hollow)] = NOTHING
        accuracy[~self.paired | self.other_shape] = UNMATCHED
        return accuracy

    def messages(self) -> Array:
        """What has to be said of each row besides its figures; most often nothing."""
        npu, bench, (at_npu, at_bench) = self.npu, self.bench, self.at
        message = self.text("note")
        message[self._empty] = "the tensor has no elements"
        for row in _where((self._lost > 0).astype(bool)):
            about = _nonfinite(int(self._lost[row]), int(self.strange[row]), bool(self._without_figures[row]))
            message[row] = join(about, message[row])
        for row in _where(self.other_shape):
            message[row] = (
                f"shapes differ: {npu.shape[at_npu[row]]} on the NPU, {bench.shape[at_bench[row]]} on the bench"
            )
        for row in _where(self.paired & ~self.other_shape & ~self.measured):
            lacking = self._without_values(npu.has_values[at_npu[row]], bench.has_values[at_bench[row]])
            message[row] = f"not measured: {join(message[row], lacking) or 'the reason is not known'}"
        self._say_lonely(message)
        self._remark(message)
        return message

    def _without_values(self, npu_has: bool, bench_has: bool) -> str:
        """Which side lacks the values of a tensor."""
        if npu_has and bench_has:
            return ""
        who = "either dump" if npu_has == bench_has else "the bench dump" if npu_has else "the NPU dump"
        return f"no values{f' ({self._files})' if self._files else ''} in {who}"

    def _say_lonely(self, message: Array) -> None:
        """Of a line without a partner: whether the whole call has none, or this tensor of it."""
        for other, lines, at in zip(("bench", "NPU"), (self.npu, self.bench), self.at, strict=True):
            paired_calls = {lines.call[line] for line in at[self.paired].tolist()}
            for row in _where(~self.paired & (at >= 0)):
                known = lines.call[at[row]] in paired_calls
                message[row] = (
                    f"its call in the {other} dump has no such tensor" if known else f"no partner in the {other} dump"
                )

    def _remark(self, message: Array) -> None:
        waiting = dict(self._remarks)
        if not waiting:
            return
        for row, line in enumerate(self.at[1].tolist()):
            if line >= 0 and (about := waiting.pop(self.bench.key[line][0], "")):
                message[row] = join(message[row], about)


def join(*parts: str) -> str:
    """What is said, with a semicolon between."""
    return "; ".join(filter(None, parts))


def _where(mask: Array) -> Iterable[int]:
    rows: list[int] = numpy.flatnonzero(mask).tolist()
    return rows


def _pick(values: Sequence[Any], at: Array) -> Array:
    """The values at these positions, `N/A` at -1."""
    held = numpy.empty(len(values) + 1, dtype=object)
    held[:-1] = values
    held[-1] = NOTHING
    return held[at]


def _nonfinite(lost: int, strange: int, every_one: bool) -> str:
    many = f"{'all ' if every_one else ''}{lost:,} element{'' if lost == 1 else 's'}"
    figures = "; nothing could be measured" if every_one else "; figures are of the others"
    if strange:
        return f"NaN or infinite: {many}, {strange:,} of them not the same on both sides{figures}"
    return f"NaN or infinite, the same on both sides: {many}{figures}"


def _partners(npu: Lines, bench: Lines, rows: pa.Table) -> tuple[Array, Array]:
    """For each line of the NPU the row and the line of the bench that belong to it, or -1."""
    positions: list[dict[Key, int]] = [{key: at for at, key in enumerate(lines.key)} for lines in (npu, bench)]
    texts = {name: rows.column(name).cast("string").to_pylist() for name in ("call", "candidate_call", "slot")}
    repeats = rows.column("repeat").to_pylist()
    row_of, bench_of, taken = [-1] * len(npu), [-1] * len(npu), [False] * len(bench)
    keys = zip(texts["call"], texts["candidate_call"], repeats, texts["slot"], strict=True)
    for row, (call, candidate, repeat, slot) in enumerate(keys):
        theirs, ours = positions[1].get((call, repeat, slot), -1), positions[0].get((candidate, repeat, slot), -1)
        # A name that a damaged dump has twice fits one line only; the other is listed without a partner.
        if ours >= 0 and theirs >= 0 and row_of[ours] < 0 and not taken[theirs]:
            row_of[ours], bench_of[ours], taken[theirs] = row, theirs, True
    return numpy.array(row_of, dtype=numpy.int64), numpy.array(bench_of, dtype=numpy.int64)


def _order(npu: Lines, bench: Lines, row_of: Array, bench_of: Array) -> tuple[Array, Array, Array]:
    """Line of the NPU, line of the bench and row of the comparison, for each row of the table; -1 where there is none.

    The NPU's order. What only the bench has stands behind what it has before it: in the middle of a pair of calls, or
    behind the whole of the call.
    """
    partner = numpy.full(len(bench), -1, dtype=numpy.int64)
    partner[bench_of[bench_of >= 0]] = numpy.flatnonzero(bench_of >= 0)
    alone = numpy.flatnonzero(partner < 0)
    first, second = numpy.arange(len(npu)), numpy.full(len(npu), -1, dtype=numpy.int64)
    if len(alone):
        first = numpy.concatenate([first, _anchors(npu, bench, partner, alone)])
        second = numpy.concatenate([second, alone])
    order = numpy.lexsort((second, first))
    none = numpy.full(len(alone), -1, dtype=numpy.int64)
    at_npu, at_bench = numpy.concatenate([numpy.arange(len(npu)), none]), numpy.concatenate([bench_of, alone])
    return at_npu[order], at_bench[order], numpy.concatenate([row_of, none])[order]


def _anchors(npu: Lines, bench: Lines, partner: Array, alone: Array) -> Array:
    """For each lonely line of the bench the line of the NPU behind which it stands; -1 is before all."""
    calls, their_calls = numpy.array(npu.call, dtype=numpy.int64), numpy.array(bench.call, dtype=numpy.int64)
    places = numpy.arange(len(partner))
    before = numpy.maximum.accumulate(numpy.where(partner >= 0, places, -1))[alone]
    behind = numpy.minimum.accumulate(numpy.where(partner >= 0, places, len(partner))[::-1])[::-1][alone]
    anchors = numpy.full(len(alone), -1, dtype=numpy.int64)

    known = before >= 0
    anchors[known] = numpy.searchsorted(calls, calls[partner[before[known]]], side="right") - 1
    within = known.copy()
    within[known] = their_calls[before[known]] == their_calls[alone[known]]
    anchors[within] = partner[before[within]]
    starts = ~within & (behind < len(partner))
    starts[starts] = their_calls[behind[starts]] == their_calls[alone[starts]]
    anchors[starts] = numpy.searchsorted(calls, calls[partner[behind[starts]]], side="left") - 1
    return anchors

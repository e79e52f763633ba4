"""The result table of ptdbg_ascend: a row for every line of either dump, in the order in which the NPU executed them.

In: the lines of both dumps and the rows of a comparison. Out: columns. What has no partner is `Unmatched`, what could not be
measured is `N/A` with the reason: neither is ever `Yes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from ptdbg_ascend.lines import Lines

if TYPE_CHECKING:
    import pyarrow as pa

Array = numpy.ndarray[Any, Any]

# The guide's prose has "Npu Tensor Dtype" and "MaxAbsError"; the files that the tool wrote have these.
COLUMNS = (
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape", "Cosine", "MaxAbsErr",
    "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean", "Accuracy Reached or Not", "Err_message",
)  # fmt: skip
FIGURES = COLUMNS[6:14]
"""The columns of numbers; `N/A` where there is none."""
STACK_COLUMN = "NPU_Stack_Info"
NOTHING = "N/A"
YES, NO, UNMATCHED = "Yes", "No", "Unmatched"
ROW_COLUMNS = (
    "call", "candidate_call", "repeat", "slot", "baseline_shape", "candidate_shape", "basis", "count", "max_abs",
    "one_minus_cosine", "nonfinite_different", "verdict", "note",
)  # fmt: skip
"""What is needed of the rows of a comparison."""
_ACCURACY = {"agrees": YES, "diverges": NO}


@dataclass
class Table:
    """The rows. `npu` and `bench` are the positions of their lines, -1 where a side has none."""

    npu: Array
    bench: Array
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.npu)

    def find(self, accuracy: str) -> Array:
        """The rows with that result, from 0; in an editor, where the header is line 1, row 0 is line 2."""
        return numpy.flatnonzero(numpy.array(self.columns["Accuracy Reached or Not"], dtype=object) == accuracy)

    def name(self, row: int) -> str:
        """The name of the row's line: the NPU's, or the bench's where only that has one. As the dump has it."""
        held: str = self.columns["NPU Name"][row]
        return held if self.npu[row] >= 0 else self.columns["Bench Name"][row]


def make_table(npu: Lines, bench: Lines, rows: pa.Table, *, stack: Callable[[int | None], str] | None = None) -> Table:
    """The table of one rank; `rows` are those of a comparison with the bench as baseline. `stack` words the NPU's stacks."""
    at_npu, at_bench, row_of = _order(npu, bench, *_partners(npu, bench, rows))
    sides = ((npu, at_npu), (bench, at_bench))
    elements = _pick(npu.elements, at_npu)
    elements[at_npu < 0] = 0
    measured = _Measured(rows, row_of, elements)
    columns: dict[str, list[Any]] = {}
    for title in ("name", "dtype", "shape"):
        shown = "Name" if title == "name" else f"Tensor {title.capitalize()}"
        for who, (lines, at) in zip(("NPU", "Bench"), sides, strict=True):
            columns[f"{who} {shown}"] = _pick(getattr(lines, title), at).tolist()
    columns["Cosine"] = measured.shown(1 - measured.column("one_minus_cosine"))
    columns["MaxAbsErr"] = measured.shown(measured.column("max_abs"))
    for who, (lines, at) in zip(("NPU", "Bench"), sides, strict=True):
        for position, kind in enumerate(("max", "min", "mean")):
            numbers = [NOTHING if held is None else held[position] for held in lines.statistics]
            columns[f"{who} {kind}"] = _pick(numbers, at).tolist()
    columns["Accuracy Reached or Not"] = measured.accuracy()
    columns["Err_message"] = _messages(sides, measured)
    if stack is not None:
        columns[STACK_COLUMN] = _pick([stack(number) or NOTHING for number in npu.stack], at_npu).tolist()
    return Table(at_npu, at_bench, columns)


def _pick(values: Sequence[Any], at: Array) -> Array:
    """The values at these positions, `N/A` at -1."""
    held = numpy.empty(len(values) + 1, dtype=object)
    held[:-1] = values
    held[-1] = NOTHING
    return held[at]


def _partners(npu: Lines, bench: Lines, rows: pa.Table) -> tuple[Array, Array]:
    """For each line of the NPU the row and the line of the bench that belong to it, or -1."""
    positions = [{key: at for at, key in enumerate(lines.key)} for lines in (npu, bench)]
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


class _Measured:
    """Columns of a comparison in the order of the table, and what they are worth."""

    def __init__(self, rows: pa.Table, row_of: Array, elements: Array) -> None:
        self._rows, self._row_of = rows, row_of
        self.paired = row_of >= 0
        self.other_shape = self.paired & (self.text("baseline_shape") != self.text("candidate_shape"))
        basis = self.text("basis")
        self.by_values = self.paired & ~self.other_shape & ((basis == "values") | (basis == "digest"))
        self.empty = self.by_values & (elements == 0).astype(bool)
        count = self.column("count", missing=0)
        self.lost = numpy.where(self.by_values, elements - count, 0)
        """Elements that are NaN or infinite on a side."""
        self.strange = numpy.where(self.by_values, self.column("nonfinite_different", missing=0), 0)
        """Of those, the ones that are not the same on both."""
        self.without_figures = (self.lost > 0).astype(bool) & (count == 0)
        self.hollow = self.without_figures & (self.strange == 0)
        """Nothing but NaN and infinities, all alike: that is no measurement."""

    def column(self, name: str, missing: float = numpy.nan) -> Array:
        """A column of numbers; `missing` where a row has no partner."""
        held = self._rows.column(name).to_numpy()
        return numpy.append(held, numpy.array(missing, dtype=held.dtype))[self._row_of]

    def text(self, name: str) -> Array:
        """A column of texts; empty where a row has no partner."""
        held = numpy.empty(self._rows.num_rows + 1, dtype=object)
        held[:-1], held[-1] = self._rows.column(name).cast("string").to_pylist(), ""
        return held[self._row_of]

    def shown(self, figures: Array) -> list[Any]:
        """The figures, `N/A` where nothing was measured."""
        held = figures.astype(object)
        held[~self.by_values | self.without_figures] = NOTHING
        shown: list[Any] = held.tolist()
        return shown

    def accuracy(self) -> list[str]:
        """Whether the accuracy is reached: only ever `Yes` for what was measured."""
        verdict = self.text("verdict")
        accuracy = numpy.full(len(verdict), NOTHING, dtype=object)
        for held, shown in _ACCURACY.items():
            accuracy[verdict == held] = shown
        accuracy[(accuracy == YES) & (~self.by_values | self.hollow)] = NOTHING
        accuracy[~self.paired | self.other_shape] = UNMATCHED
        decided: list[str] = accuracy.tolist()
        return decided


def _messages(sides: Sequence[tuple[Lines, Array]], measured: _Measured) -> list[str]:
    """What has to be said of each row besides its figures; most often nothing."""
    (npu, at_npu), (bench, at_bench) = sides
    message = measured.text("note")
    message[measured.empty] = "the tensor has no elements"
    for row in numpy.flatnonzero((measured.lost > 0).astype(bool)).tolist():
        about = _nonfinite(int(measured.lost[row]), int(measured.strange[row]), bool(measured.without_figures[row]))
        message[row] = f"{about}; {message[row]}" if message[row] else about
    for row in numpy.flatnonzero(measured.other_shape).tolist():
        message[row] = f"shapes differ: {npu.shape[at_npu[row]]} on the NPU, {bench.shape[at_bench[row]]} on the bench"
    for row in numpy.flatnonzero(measured.paired & ~measured.other_shape & ~measured.by_values).tolist():
        lacking = _without_values(npu.has_values[at_npu[row]], bench.has_values[at_bench[row]])
        message[row] = "not measured: " + (
            "; ".join(filter(None, (message[row], lacking))) or "the reason is not known"
        )
    _say_lonely(sides, measured, message)
    said: list[str] = message.tolist()
    return said


def _without_values(npu_has: bool, bench_has: bool) -> str:
    """Which side lacks the values of a tensor."""
    if npu_has and bench_has:
        return ""
    who = "either dump" if npu_has == bench_has else "the bench dump" if npu_has else "the NPU dump"
    return f"no values (.npy) in {who}"


def _nonfinite(lost: int, strange: int, every_one: bool) -> str:
    many = f"{'all ' if every_one else ''}{lost:,} element{'' if lost == 1 else 's'}"
    figures = "; nothing could be measured" if every_one else "; figures are of the others"
    if strange:
        return f"NaN or infinite: {many}, {strange:,} of them not the same on both sides{figures}"
    return f"NaN or infinite, the same on both sides: {many}{figures}"


def _say_lonely(sides: Sequence[tuple[Lines, Array]], measured: _Measured, message: Array) -> None:
    """Of a line without a partner: whether the whole call has none, or this tensor of it."""
    for other, (lines, at) in zip(("bench", "NPU"), sides, strict=True):
        paired_calls = {lines.call[line] for line in at[measured.paired].tolist()}
        for row in numpy.flatnonzero(~measured.paired & (at >= 0)).tolist():
            known = lines.call[at[row]] in paired_calls
            message[row] = (
                f"its call in the {other} dump has no such tensor" if known else f"no partner in the {other} dump"
            )

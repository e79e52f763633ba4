"""The rows of a table: which line of the NPU's dump stands beside which of the bench's, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from tensorprobe.legacy.compared.tables import BY_VALUES, NOTHING, UNMATCHED, Key, Lines, StackOf, TableStyle

if TYPE_CHECKING:
    import pyarrow as pa

Array = numpy.ndarray[Any, Any]
_SUMS = 1e-5
"""How much a mean or a norm in float32 may be off, relative to the greatest figure."""


class Paired:
    """Rows of a table in the making; `at` has the positions of the lines of NPU and bench, -1 where a side has none.

    `remarks` are sentences on calls of the bench, for the first row of each.
    """

    def __init__(
        self,
        npu: Lines,
        bench: Lines,
        rows: pa.Table,
        *,
        style: TableStyle,
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        self.npu, self.bench, self._style = npu, bench, style
        at_npu, at_bench, self._row_of = _order(npu, bench, *_partners(npu, bench, rows))
        self.at = (at_npu, at_bench)
        self._rows, self._remarks = rows, dict(remarks or {})
        self._number = (_pick(npu.number, at_npu), _pick(bench.number, at_bench))
        self.is_number = _filled(self._number[0]) | _filled(self._number[1])
        self.paired = (self._row_of >= 0) | (self.is_number & (at_npu >= 0) & (at_bench >= 0))
        known = (self.text("baseline_dtype") != "") & (self.text("candidate_dtype") != "")
        self.other_shape = self.paired & known & (self.text("baseline_shape") != self.text("candidate_shape"))
        excuses = _pick(npu.excuse, at_npu), _pick(bench.excuse, at_bench)
        self.excuse = numpy.where(excuses[0] == NOTHING, excuses[1], excuses[0])
        self.excuse[self.paired] = ""
        for row in _where(~self.paired & (self.excuse == "")):
            lines, line = (npu, at_npu[row]) if at_npu[row] >= 0 else (bench, at_bench[row])
            self.excuse[row] = lines.excuse_of(*lines.key[line][:2])
        lonely = ~self.paired & (self.excuse == "")
        self.unfit = lonely | self.other_shape
        if style.whole_calls:
            self.unfit = self._spread(self.unfit)
        basis = self.text("basis")
        self.measured = self.paired & ~self.unfit & numpy.isin(basis, style.bases)
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

    def _spread(self, unfit: Array) -> Array:
        """Return the rows of every call of which a row is unfit."""
        for lines, at in zip((self.npu, self.bench), self.at, strict=True):
            calls = _pick(lines.call, at)
            unfit = unfit | numpy.isin(calls, [call for call in calls[unfit].tolist() if call != NOTHING])
        return unfit

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

    def same_statistics(self, row: int) -> bool:
        """Whether the statistics of both sides are the same but for the rounding of their sums."""
        ours, theirs = (lines.statistics[at[row]] for lines, at in zip((self.npu, self.bench), self.at, strict=True))
        if ours is None or theirs is None:
            return False
        extremes = ours[:2] == theirs[:2]
        return extremes and all(
            one == other or abs(one - other) <= _SUMS * max(map(abs, (*ours[:2], one, other)))
            for one, other in zip(ours[2:4], theirs[2:4], strict=True)
        )

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
        accuracy[self.is_number & (self._number[0] == self._number[1])] = words.get("agrees", self._style.good)
        accuracy[self.unfit] = UNMATCHED
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
        for row in _where(self.unfit & self.paired & ~self.other_shape):
            message[row] = join("its call has other tensors in the other dump: not the same API", message[row])
        for row in _where(self.is_number & self.paired & (self._number[0] != self._number[1])):
            message[row] = f"{self._number[0][row]} on the NPU, {self._number[1][row]} on the bench"
        for row in _where(self.paired & ~self.unfit & ~self.measured & ~self.is_number):
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
        return f"no values{f' ({self._style.files})' if self._style.files else ''} in {who}"

    def _say_lonely(self, message: Array) -> None:
        """Of a line without a partner: whether the whole call has none, or this tensor of it."""
        for other, lines, at in zip(("bench", "NPU"), (self.npu, self.bench), self.at, strict=True):
            paired_calls = {lines.call[line] for line in at[self.paired].tolist()}
            for row in _where(~self.paired & (at >= 0)):
                known = lines.call[at[row]] in paired_calls
                what = (
                    f"its call in the {other} dump has no such tensor" if known else f"no partner in the {other} dump"
                )
                message[row] = self.excuse[row] or what

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


def _filled(values: Array) -> Array:
    """Which of the values are numbers."""
    found: Array = numpy.array([value is not None and value is not NOTHING for value in values.tolist()], dtype=bool)
    return found


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
    partners = dict(zip(texts["candidate_call"], texts["call"], strict=True))
    for ours, (call, repeat, place) in enumerate(npu.key):
        if npu.number[ours] is not None:  # not measured, so it has no row
            theirs = positions[1].get((partners.get(call, call), repeat, place), -1)
            if theirs >= 0 and bench.number[theirs] is not None:
                bench_of[ours] = theirs
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

"""Execute the plan: measure every pair of slots of one rank in one step. Facts only, no threshold and no opinion.

In: two runs, a step and a rank of each, an alignment's options. Out: `Measured` columns, findings of structure, and the
bucket of every call. Tensors with equal digests are not read; a pair of tensors that shows up in several calls is
measured once. Where there are no values, statistics stand in, and the column `basis` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy

from tensorprobe.compare.align import Alignment, Detail, Options, Suggestions, align_calls
from tensorprobe.compare.jobs import Jobs, logical_index, stored_alike
from tensorprobe.compare.names import canonical_op
from tensorprobe.compare.reading import CallPair, read_pairs
from tensorprobe.compare.structure import Fact, call_facts, pair_slots, slot_facts
from tensorprobe.errors import TensorDamaged
from tensorprobe.model import DTYPES, Call, Slot
from tensorprobe.model.comparison import Buckets, Finding
from tensorprobe.model.measured import (
    DIGEST,
    HARD,
    NONE,
    SIDES,
    SOFT,
    STATISTICS,
    UNKNOWN_DTYPE,
    VALUES,
    Calls,
    Measured,
    Rows,
)
from tensorprobe.numerics.pairs import derive
from tensorprobe.record.blob import ByteSource
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Run, Segment

MAX_SUGGESTED = 50
"""Calls without a partner for which the nearest one is looked up; each costs a search."""
MAX_FINDINGS = 10_000
_HARD = ("shape", "slots", "raised")

_SIDE_CODES = {name: code for code, name in enumerate(SIDES)}
_DTYPE_CODES = {name: dtype.code for name, dtype in DTYPES.items()}
_MOMENTS = ("max", "min", "mean", "norm", "nan", "inf")
_NO_SUMMARY = (float("nan"),) * 4 + (-1, -1)

Progress = Callable[[int], None]
Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """Which step and rank of the baseline meets which of the candidate."""

    step: int
    rank: int
    candidate_step: int
    candidate_rank: int


def measure_segment(
    runs: tuple[Run, Run],
    place: Place,
    *,
    options: Options | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Measured:
    """Align and measure one step of one rank; `progress` is told how many pairs of calls were done."""
    segments = (
        runs[0].segment(place.step, place.rank),
        runs[1].segment(place.candidate_step, place.candidate_rank),
    )
    indexes = (segments[0].index(), segments[1].index())
    entries = (indexes[0].entries, indexes[1].entries)
    details = _Details(segments, entries)
    alignment = align_calls(*entries, details.of, options or Options())
    table = _Table((segments[0].source, segments[1].source), Jobs(threads), place.step, place.rank)
    table.count_damage(indexes)
    try:
        for pair in read_pairs(segments, entries, alignment.pairs):
            table.add(pair)
            if progress is not None:
                progress(1)
        figures = table.figures()
    except BaseException:
        table.jobs.abandon()
        raise
    table.add_unpaired(entries, alignment, details)
    return Measured(
        place.step, place.rank, table.calls, table.rows(figures), list(table.keys), table.buckets, table.findings
    )


class _Details:
    """Level, module, and shapes and dtypes of the slots, of every call; read when names do not settle the alignment."""

    def __init__(self, segments: tuple[Segment, Segment], entries: tuple[Sequence[Entry], Sequence[Entry]]) -> None:
        self._segments, self._entries = segments, entries
        self._read: dict[str, list[Detail]] = {}

    def of(self, side: Literal["baseline", "candidate"]) -> list[Detail]:
        if side not in self._read:
            at = side == "candidate"
            self._read[side] = _read_details(self._segments[at], self._entries[at])
        return self._read[side]


def _read_details(segment: Segment, entries: Sequence[Entry]) -> list[Detail]:
    by_line: dict[int, Detail] = {}
    for item in segment.calls():
        if not isinstance(item, Damage):
            line, call = item
            by_line[line] = Detail(
                call.level, call.module, tuple((slot.name, slot.dtype, slot.shape) for slot in call.slots)
            )
    unreadable = Detail("", "", None)
    return [by_line.get(entry.line, unreadable) for entry in entries]


@dataclass
class _Table:
    """Columns in the making."""

    sources: tuple[ByteSource, ByteSource]
    jobs: Jobs
    step: int
    rank: int
    calls: Calls = field(default_factory=Calls)
    buckets: Buckets = field(default_factory=Buckets)
    findings: list[Finding] = field(default_factory=list)
    keys: dict[Any, int] = field(default_factory=dict)
    _forwards: dict[str, int] = field(default_factory=dict)
    _job_of: dict[Any, int] = field(default_factory=dict)
    _call: list[int] = field(default_factory=list)
    _slots: list[tuple[Slot, Slot]] = field(default_factory=list)
    _basis: list[int] = field(default_factory=list)
    _job: list[int] = field(default_factory=list)
    _key: list[int] = field(default_factory=list)
    _note: list[str] = field(default_factory=list)

    def count_damage(self, indexes: Iterable[Any]) -> None:
        damaged = sum(len(index.damage) for index in indexes)
        if damaged:
            self._skip("damaged line", damaged)

    def add(self, pair: CallPair | str) -> None:
        if isinstance(pair, str):
            self._skip(pair, 2)
            return
        line, baseline, candidate = pair
        calls, number = self.calls, len(self.calls.name)
        direction = baseline.direction
        calls.name.append(baseline.name)
        calls.candidate.append(candidate.name)
        calls.op.append(canonical_op(baseline.op))
        calls.index.append(line)
        calls.repeat.append(baseline.repeat)
        calls.level.append(baseline.level)
        calls.direction.append(direction)
        calls.module.append(baseline.module)
        calls.stack.append(baseline.stack)
        calls.first_row.append(len(self._call))
        if direction == "forward":
            self._forwards[baseline.name] = number
            calls.forward.append(-1)
        else:
            calls.forward.append(self._forwards.get(baseline.name.replace(".backward", ".forward"), -1))
        self.buckets.paired += 1
        facts = self._add_slots(number, baseline, candidate)
        calls.structural.append(max((HARD if kind in _HARD else SOFT for kind, _ in facts), default=0))
        for kind, detail in facts:
            self._find(
                Finding(
                    kind=kind,
                    step=self.step,
                    rank=self.rank,
                    index=line,
                    call=baseline.name,
                    module=baseline.module,
                    detail=detail,
                )
            )

    def _add_slots(self, number: int, baseline: Call, candidate: Call) -> list[Fact]:
        pairs, lacking, extra = pair_slots(baseline, candidate)
        facts: list[Fact] = []
        if (
            lacking
            or extra
            or baseline.args != candidate.args
            or baseline.kwargs != candidate.kwargs
            or baseline.raised != candidate.raised
        ):
            facts += call_facts(baseline, candidate, lacking, extra)
        for ours, theirs in pairs:
            self._call.append(number)
            self._slots.append((ours, theirs))
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                facts += slot_facts(ours, theirs)
            self._measure(ours, theirs)
        return facts

    def _measure(self, ours: Slot, theirs: Slot) -> None:
        """Decide from what the pair is measured, and hand it on."""
        basis, job, note = NONE, -1, ""
        if ours.skipped or theirs.skipped:
            note = ours.skipped or theirs.skipped or ""
        elif ours.shape != theirs.shape:
            note = "other shape"
        elif (
            ours.digest is not None
            and ours.digest == theirs.digest
            and ours.dtype == theirs.dtype
            and (ours.stride == theirs.stride or stored_alike(ours, theirs))
        ):
            basis = DIGEST
        elif ours.offset is not None and theirs.offset is not None:
            basis, job, note = self._hand_over(ours, theirs)
        elif ours.summary is not None and theirs.summary is not None:
            basis = STATISTICS
        else:
            note = "not recorded"
        if ours.dtype != theirs.dtype and basis in (VALUES, STATISTICS):
            note = f"{ours.dtype} against {theirs.dtype}, in the wider of both"
        self._basis.append(basis)
        self._job.append(job)
        self._note.append(note)
        identity = (
            None
            if basis == NONE
            else (ours.digest or ours.summary or ours.offset, theirs.digest or theirs.summary or theirs.offset)
        )
        self._key.append(-1 if identity is None else self.keys.setdefault(identity, len(self.keys)))

    def _hand_over(self, ours: Slot, theirs: Slot) -> tuple[int, int, str]:
        if ours.dtype not in _DTYPE_CODES or theirs.dtype not in _DTYPE_CODES:
            return NONE, -1, f"dtype {ours.dtype} is unknown"
        identity = (ours.offset, theirs.offset, ours.shape, ours.stride, theirs.stride, ours.dtype, theirs.dtype)
        job = self._job_of.get(identity)
        if job is None:
            try:
                job = self._job_of[identity] = self.jobs.add((ours, theirs), self.sources)
            except TensorDamaged as damage:
                return NONE, -1, f"damaged: {damage}"
        return VALUES, job, ""

    def figures(self) -> dict[str, Array]:
        """A column for each figure of a row; those of rows without values are filled in from what is known."""
        raw = derive(self.jobs.results())
        basis, job = numpy.array(self._basis, numpy.int8), numpy.array(self._job, numpy.int64)
        measured = basis == VALUES
        columns = {}
        for name, column in raw.items():
            wide = numpy.full(
                len(job),
                -1 if column.dtype.kind == "i" else numpy.nan,
                dtype=column.dtype if column.dtype.kind != "b" else bool,
            )
            wide[measured] = column[job[measured]]
            columns[name] = wide
        self._place_indices(columns, measured)
        sides = [self._moments(side) for side in (0, 1)]
        for side, moments in zip(("baseline", "candidate"), sides, strict=True):
            columns |= {f"{side}_{name}": moments[name] for name in _MOMENTS}
        self._fill_equal(columns, basis == DIGEST)
        undigested = numpy.array([pair[0].digest is None or pair[1].digest is None for pair in self._slots], dtype=bool)
        _fill_statistics(columns, basis == STATISTICS, undigested)
        return columns

    def _place_indices(self, columns: dict[str, Array], measured: Array) -> None:
        """Indices are of the stored bytes; where these are permuted alike on both sides, say them in logical order."""
        for row in numpy.flatnonzero(measured):
            ours, theirs = self._slots[row]
            if ours.stride is not None and stored_alike(ours, theirs):
                for name in ("max_abs_index", "nonfinite_index"):
                    columns[name][row] = logical_index(ours, int(columns[name][row]))

    def _moments(self, side: int) -> dict[str, Array]:
        rows = [
            _NO_SUMMARY
            if (summary := pair[side].summary) is None
            else (summary.max, summary.min, summary.mean, summary.norm, summary.nan, summary.inf)
            for pair in self._slots
        ]
        table = numpy.array(rows, dtype=numpy.float64).reshape(-1, len(_MOMENTS))
        return {name: table[:, at] if at < 4 else table[:, at].astype(numpy.int64) for at, name in enumerate(_MOMENTS)}

    def _fill_equal(self, columns: dict[str, Array], equal: Array) -> None:
        counts = numpy.array([pair[0].count for pair in self._slots], dtype=numpy.int64)
        lost = numpy.maximum(columns["baseline_nan"], 0) + numpy.maximum(columns["baseline_inf"], 0)
        columns["count"][equal] = numpy.maximum(counts - lost, 0)[equal]
        for name, value in _EQUAL.items():
            columns[name][equal] = value

    def rows(self, figures: dict[str, Array]) -> Rows:
        """The finished columns."""
        ours, theirs = [pair[0] for pair in self._slots], [pair[1] for pair in self._slots]
        return Rows(
            call=numpy.array(self._call, dtype=numpy.int64),
            slot=[slot.name for slot in ours],
            side=numpy.array([_SIDE_CODES.get(slot.side, 0) for slot in ours], dtype=numpy.int8),
            dtypes=(_codes(ours), _codes(theirs)),
            dtype_names=([slot.dtype for slot in ours], [slot.dtype for slot in theirs]),
            shapes=([slot.shape for slot in ours], [slot.shape for slot in theirs]),
            basis=numpy.array(self._basis, dtype=numpy.int8),
            key=numpy.array(self._key, dtype=numpy.int64),
            grad=numpy.array([slot.grad for slot in ours], dtype=bool),
            note=self._note,
            figures=figures,
        )

    def add_unpaired(
        self, entries: tuple[Sequence[Entry], Sequence[Entry]], alignment: Alignment, details: _Details
    ) -> None:
        """The calls that only one side has, with the nearest of the other side for the first of them."""
        self.buckets.only_baseline += len(alignment.only_baseline)
        self.buckets.only_candidate += len(alignment.only_candidate)
        for _, _, reason in alignment.skipped:
            self._skip(reason, 1)
        if not alignment.only_baseline and not alignment.only_candidate:
            return
        suggestions = Suggestions(alignment, *entries, details.of)
        self._add_unpaired_side("baseline", alignment.only_baseline, entries, details, suggestions)
        self._add_unpaired_side("candidate", alignment.only_candidate, entries, details, suggestions)

    def _add_unpaired_side(
        self,
        side: Literal["baseline", "candidate"],
        positions: Sequence[int],
        entries: tuple[Sequence[Entry], Sequence[Entry]],
        details: _Details,
        suggestions: Suggestions,
    ) -> None:
        ours, theirs = entries if side == "baseline" else entries[::-1]
        kind: Literal["only_baseline", "only_candidate"] = "only_baseline" if side == "baseline" else "only_candidate"
        for number, position in enumerate(positions[:MAX_FINDINGS]):
            near = suggestions.nearest(side, position) if number < MAX_SUGGESTED else None
            self._find(
                Finding(
                    kind=kind,
                    step=self.step,
                    rank=self.rank,
                    index=ours[position].line,
                    call=ours[position].name,
                    module=details.of(side)[position].module,
                    suggestion="" if near is None else f"{theirs[near.position].name} ({near.reason})",
                )
            )

    def _find(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def _skip(self, reason: str, count: int) -> None:
        self.buckets.skipped[reason] = self.buckets.skipped.get(reason, 0) + count


_EQUAL: dict[str, Any] = {
    "bit_identical": True,
    "different": 0,
    **dict.fromkeys(
        "max_abs max_rel mean_abs relative_l2 one_minus_cosine bias bias_z slope_z ulp_max ulp_mean ulp_over_1 ulp_over_4".split(),
        0.0,
    ),
    **dict.fromkeys("norm_ratio slope within_1e4 within_1e3 within_5e3 within_1e2".split(), 1.0),
    "nonfinite_different": 0,
}
"""The figures of two equal tensors."""


def _fill_statistics(columns: dict[str, Array], rows: Array, undigested: Array) -> None:
    """What two summaries say of their difference: less than the values would."""
    if not rows.any():
        return
    with numpy.errstate(all="ignore"):
        norms = columns["candidate_norm"][rows] / columns["baseline_norm"][rows]
        equal = columns["candidate_norm"][rows] == columns["baseline_norm"][rows]
        columns["norm_ratio"][rows] = numpy.where(equal, 1.0, norms)
        columns["bias"][rows] = columns["candidate_mean"][rows] - columns["baseline_mean"][rows]
        places = abs(columns["candidate_nan"] - columns["baseline_nan"]) + abs(
            columns["candidate_inf"] - columns["baseline_inf"]
        )
        columns["nonfinite_different"][rows] = places[rows]
    # Without digests equal statistics are all that can be known of equal bits.
    alike = rows & undigested
    for name in _MOMENTS:
        ours, theirs = columns[f"baseline_{name}"], columns[f"candidate_{name}"]
        alike &= (ours == theirs) | ((ours != ours) & (theirs != theirs))
    columns["bit_identical"][alike] = True


def _codes(slots: list[Slot]) -> Array:
    return numpy.array([_DTYPE_CODES.get(slot.dtype, UNKNOWN_DTYPE) for slot in slots], dtype=numpy.int16)

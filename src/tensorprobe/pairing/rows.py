"""The columns of a table of rows in the making, and the figures of rows that need no kernel.

Rows are added as pairs of slots, of which nothing is kept but what the columns say: a step may have millions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

from tensorprobe.model import DTYPES, Slot
from tensorprobe.model.comparison import FIGURES
from tensorprobe.model.measured import DIGEST, NONE, SIDES, STATISTICS, UNKNOWN_DTYPE, VALUES, Rows
from tensorprobe.model.reason import Unmeasured
from tensorprobe.numerics.pairs import derive
from tensorprobe.pairing.jobs import logical_index

Array = numpy.ndarray[Any, Any]

_SIDE_CODES = {name: code for code, name in enumerate(SIDES)}
_DTYPE_CODES = {name: dtype.code for name, dtype in DTYPES.items()}
_MOMENTS = ("max", "min", "mean", "norm", "nan", "inf")
_NO_SUMMARY = (float("nan"),) * 4 + (-1, -1)
_INDICES = ("max_abs_index", "nonfinite_index")


class RowLists:
    """Columns as lists, which grow. Whoever decides how to measure fills in `basis`, `job`, `key`, `note` and `unmeasured`."""

    def __init__(self) -> None:
        self.slot: list[str] = []
        self.basis: list[int] = []
        self.job: list[int] = []
        self.key: list[int] = []
        self.note: list[str] = []
        self.unmeasured: dict[int, Unmeasured] = {}
        self.permuted: dict[int, Slot] = {}
        """Rows whose values are stored in another order than row-major, alike on both sides."""
        self._call: list[Array] = []
        self._grad: list[bool] = []
        self._digested: list[bool] = []
        self._dtypes: tuple[list[str], list[str]] = ([], [])
        self._shapes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
        self._moments: tuple[list[Array], list[Array]] = ([], [])
        self._known: dict[Any, Any] = {}

    def add(self, left: Sequence[Slot], right: Sequence[Slot], calls: Array) -> None:
        """What the slots say of themselves; `calls` are the numbers of their calls."""
        known = self._known.setdefault  # names, dtypes and shapes repeat: one object of each is enough
        self._call.append(calls)
        self.slot += [known(slot.name, slot.name) for slot in left]
        self._grad += [slot.grad for slot in left]
        self._digested += [_same_kind(a.digest, b.digest) for a, b in zip(left, right, strict=True)]
        for side, slots in enumerate((left, right)):
            self._dtypes[side].extend([known(slot.dtype, slot.dtype) for slot in slots])
            self._shapes[side].extend([known(slot.shape, slot.shape) for slot in slots])
            moments = [_NO_SUMMARY if slot.summary is None else msgspec.structs.astuple(slot.summary) for slot in slots]
            self._moments[side].append(numpy.array(moments, dtype=numpy.float64).reshape(-1, len(_MOMENTS)))

    def leave_out(self, row: int, why: Unmeasured, note: str) -> None:
        """Note that a row cannot be measured."""
        self.basis[row], self.note[row], self.unmeasured[row] = NONE, note, why

    def finish(self, raw: Array, directions: Sequence[str]) -> Rows:
        """The finished columns; `raw` has what the kernel measured, `directions` are those of the calls."""
        sides = {name: code for name in set(self.slot) if (code := _SIDE_CODES.get(name.partition(".")[0], 0)) >= 0}
        call = numpy.concatenate(self._call) if self._call else numpy.zeros(0, dtype=numpy.int64)
        side = numpy.array([sides[name] for name in self.slot], dtype=numpy.int8)
        backward = numpy.array([direction == "backward" for direction in directions], dtype=bool)
        output, parameters = SIDES.index("output"), SIDES.index("parameters")
        basis = numpy.array(self.basis, dtype=numpy.int8)
        return Rows(
            call=call,
            slot=self.slot,
            side=side,
            made=(side == output) | ((side == parameters) & backward[call]),
            dtypes=(_codes(self._dtypes[0]), _codes(self._dtypes[1])),
            dtype_names=self._dtypes,
            shapes=self._shapes,
            basis=basis,
            key=numpy.array(self.key, dtype=numpy.int64),
            grad=numpy.array(self._grad, dtype=bool),
            other_bits=numpy.array(self._digested, dtype=bool) & (basis != DIGEST),
            note=self.note,
            figures=self._figures(raw),
            unmeasured=self.unmeasured,
        )

    def _figures(self, raw: Array) -> dict[str, Array]:
        """A column for each figure of a row; those of rows without values are filled in from what is known."""
        basis, job = numpy.array(self.basis, dtype=numpy.int8), numpy.array(self.job, dtype=numpy.int64)
        measured = basis == VALUES
        columns = {}
        for name, values in derive(raw).items():
            if name == "bit_identical":
                column = numpy.zeros(len(job), dtype=bool)
            else:
                column = numpy.full(len(job), -1 if values.dtype.kind == "i" else numpy.nan, dtype=values.dtype)
            column[measured] = values[job[measured]]
            columns[name] = column
        for row, slot in self.permuted.items():
            for name in _INDICES:
                columns[name][row] = logical_index(slot, int(columns[name][row]))
        for side, parts in zip(("baseline", "candidate"), self._moments, strict=True):
            table = numpy.concatenate(parts) if parts else numpy.zeros((0, len(_MOMENTS)))
            for at, name in enumerate(_MOMENTS):
                values = table[:, at]
                columns[f"{side}_{name}"] = values.copy() if at < 4 else _whole(values)
        # The norm of values whose statistics were not recorded is known from the kernel.
        for name, squares in (("baseline_norm", "squares_a"), ("candidate_norm", "squares_b")):
            lacking = measured & numpy.isnan(columns[name]) & (columns["count"] > 0)
            at = job[lacking]
            columns[name][lacking] = numpy.sqrt(raw[squares][at]) / raw["scale"][at]
        self._fill_equal(columns, basis == DIGEST)
        _fill_statistics(columns, basis == STATISTICS, numpy.array(self._digested, dtype=bool))
        return columns

    def _fill_equal(self, columns: dict[str, Array], equal: Array) -> None:
        sizes = {shape: int(numpy.prod(shape, dtype=object)) for shape in set(self._shapes[0])}
        counts = numpy.array([min(sizes[shape], 2**62) for shape in self._shapes[0]], dtype=numpy.int64)
        lost = numpy.maximum(columns["baseline_nan"], 0) + numpy.maximum(columns["baseline_inf"], 0)
        columns["count"][equal] = numpy.maximum(counts - lost, 0)[equal]
        for name, figure in FIGURES.items():
            columns[name][equal] = figure.equal


def _fill_statistics(columns: dict[str, Array], rows: Array, digested: Array) -> None:
    """What two summaries say of their difference: less than the values would."""
    if not rows.any():
        return
    with numpy.errstate(all="ignore"):
        norms = columns["candidate_norm"][rows] / columns["baseline_norm"][rows]
        equal = columns["candidate_norm"][rows] == columns["baseline_norm"][rows]
        columns["norm_ratio"][rows] = numpy.where(equal, 1.0, norms)
        columns["bias"][rows] = columns["candidate_mean"][rows] - columns["baseline_mean"][rows]
    columns["nonfinite_different"][rows] = (_places(columns, "nan") + _places(columns, "inf"))[rows]
    # Without digests equal statistics are all that can be known of equal bits.
    alike = rows & ~digested
    for name in _MOMENTS:
        ours, theirs = columns[f"baseline_{name}"], columns[f"candidate_{name}"]
        alike &= (ours == theirs) | ((ours != ours) & (theirs != theirs))
    columns["bit_identical"][alike] = True


def _places(columns: dict[str, Array], name: str) -> Array:
    """By how many places the counts differ. A count of -1 is "some": it differs from none, and from nothing else."""
    ours, theirs = columns[f"baseline_{name}"], columns[f"candidate_{name}"]
    uncounted = (ours < 0) | (theirs < 0)
    return numpy.where(uncounted, (ours == 0) | (theirs == 0), abs(theirs - ours))


def _same_kind(one: str | None, other: str | None) -> bool:
    """Whether two digests can be compared: those of other tools say their kind before a colon."""
    return one is not None and other is not None and one.rpartition(":")[0] == other.rpartition(":")[0]


def _whole(values: Array) -> Array:
    """Counts from disk, which may be absurd, as 64-bit integers."""
    return numpy.clip(values, -1, 2.0**62).astype(numpy.int64)


def _codes(names: Sequence[str]) -> Array:
    return numpy.array([_DTYPE_CODES.get(name, UNKNOWN_DTYPE) for name in names], dtype=numpy.int16)

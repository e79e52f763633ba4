"""Measure pairs of tensors, and collect the rows of the result as columns.

`Kernel` measures each distinct pair once: small ones in batches, large ones in pieces. How a pair is cut depends on its size
alone, so the figures do not depend on the number of threads. Tensors are read in place; if strides differ, at most `PIECE`
bytes are copied at a time. `RowLists` collects the columns, and derives the figures of rows that need no kernel. It keeps no
slots: a step may have millions of them.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy

from tensorprobe.errors import TensorDamaged
from tensorprobe.model import DTYPES, Slot, Summary
from tensorprobe.model.comparison import FIGURES
from tensorprobe.model.measured import DIGEST, NONE, SIDES, STATISTICS, UNKNOWN_DTYPE, VALUES, Rows
from tensorprobe.model.reason import Unmeasured
from tensorprobe.numerics.masks import MASK_RATIO, blank_masks, blank_other_masks, mask_values, other_masks
from tensorprobe.numerics.pairs import RAW, derive, join_pairs, measure_pairs, table_of
from tensorprobe.numerics.sketch import estimate_distance, sketch_of
from tensorprobe.numerics.summary import Moments, join_moments, summarize_batch
from tensorprobe.record.elements import is_dense, to_numpy
from tensorprobe.record.run import Segment

PIECE = 32 << 20
"""Bytes of one side that are measured in one piece."""
BATCH_BYTES = 8 << 20
BATCH_PAIRS = 2048
_WAITING = 4
"""Batches that may wait for each thread. The limit keeps reading from running far ahead of measuring."""

_SIDE_CODES = {name: code for code, name in enumerate(SIDES)}
_DTYPE_CODES = {name: dtype.code for name, dtype in DTYPES.items()}
_MOMENTS = ("max", "min", "mean", "norm", "nan", "inf")
_NO_SUMMARY = Summary(*(float("nan"),) * 4, -1, -1)
_INDICES = ("max_abs_index", "nonfinite_index")

Array = numpy.ndarray[Any, Any]


class Kernel:
    """Measures pairs of slots of two segments in `threads` threads. A context manager: leaving it stops the threads."""

    def __init__(self, segments: tuple[Segment, Segment], threads: int) -> None:
        self._sources = (segments[0].source, segments[1].source)
        self._known: dict[tuple[object, ...], int] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tensorprobe-measure")
        self._waiting: deque[Future[Array]] = deque()
        self._limit = _WAITING * threads
        self._done: list[Array] = []
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._held: dict[int, object] = {}
        self._bytes = 0
        self._sketches: dict[tuple[object, ...], str | None] = {}
        self.apart: dict[int, Apart] = {}
        """What was set apart of pairs, by their position in `results()`."""

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def measure(self, ours: Slot, theirs: Slot) -> int:
        """Return the position of the pair in `results()`. The slots have equal shapes and known dtypes.

        Raises TensorDamaged as `ByteSource.hold` does.
        """
        pair = (ours.offset, theirs.offset, ours.shape, ours.dtype, theirs.dtype, ours.stride, theirs.stride)
        position = self._known.get(pair)
        if position is None:
            self._start(ours, theirs)
            position = self._known[pair] = len(self._known)
        return position

    def distance(self, ours: Slot, theirs: Slot) -> float:
        """Return about the norm of the difference of two slots, one of which has a sketch for values; NaN when it is unknown."""
        sketches = [self._sketch(side, slot) for side, slot in enumerate((ours, theirs))]
        one, other = sketches
        return float("nan") if one is None or other is None else estimate_distance(one, other)

    def _sketch(self, side: int, slot: Slot) -> str | None:
        if slot.sketch is not None or not slot.has_data or slot.dtype not in DTYPES:
            return slot.sketch
        place = (side, slot.offset, slot.shape, slot.dtype, slot.stride)
        if place not in self._sketches:
            try:
                self._sketches[place] = sketch_of(to_numpy(self._sources[side].read(slot), slot))
            except TensorDamaged:
                self._sketches[place] = None
        return self._sketches[place]

    def _start(self, ours: Slot, theirs: Slot) -> None:
        (address_a, held_a), (address_b, held_b) = self._sources[0].hold(ours), self._sources[1].hold(theirs)
        one, other = DTYPES[ours.dtype], DTYPES[theirs.dtype]
        nbytes, slots = ours.nbytes, (ours, theirs)
        if mask_values(ours) or other_masks(ours, theirs):
            position = len(self._known)
            self._submit_alone(_measure_apart, slots, (address_a, address_b), (held_a, held_b), position, self.apart)
            return
        if (ours.stride is None and theirs.stride is None) or stored_alike(ours, theirs):
            row = (address_a, address_b, nbytes // one.itemsize, one.code, other.code)
            if nbytes <= PIECE:
                self._append(row, held_a, held_b, nbytes)
                return
        self._submit_alone(_measure_whole, slots, (address_a, address_b), (held_a, held_b))

    def results(self) -> Array:
        """Return the raw figures of all pairs; no pair can be measured after that."""
        self._flush()
        while self._waiting:
            self._done.append(self._waiting.popleft().result())
        self._pool.shutdown()
        return numpy.concatenate(self._done) if self._done else numpy.empty(0, RAW)

    def _append(self, row: tuple[int, int, int, int, int], held_a: object, held_b: object, nbytes: int) -> None:
        self._rows.append(row)
        self._held |= {id(held_a): held_a, id(held_b): held_b}
        self._bytes += nbytes
        if self._bytes >= BATCH_BYTES or len(self._rows) >= BATCH_PAIRS:
            self._flush()

    def _submit_alone(self, measure: Any, *arguments: Any) -> None:
        self._flush()
        self._submit(measure, *arguments)

    def _flush(self) -> None:
        if self._rows:
            self._submit(_measure_batch, self._rows, self._held)
            self._rows, self._held, self._bytes = [], {}, 0

    def _submit(self, measure: Any, *arguments: Any) -> None:
        while len(self._waiting) >= self._limit:
            self._done.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(measure, *arguments))


def stored_alike(baseline: Slot, candidate: Slot) -> bool:
    """Return whether both sides store their elements in the same order; shapes are equal."""
    return _block_strides(baseline) == _block_strides(candidate)


def _block_strides(slot: Slot) -> tuple[int, ...] | None:
    """Return the strides of the stored block without dimensions of size 1; None when it is row-major."""
    if (
        slot.stride is None
        or len(slot.stride) != len(slot.shape)
        or not slot.count
        or not is_dense(slot.shape, slot.stride)
    ):
        return None
    strides = tuple(step for step, size in zip(slot.stride, slot.shape, strict=True) if size != 1)
    sizes = tuple(size for size in slot.shape if size != 1)
    return None if strides == tuple(row_major(sizes)) else strides


def row_major(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def logical_index(slot: Slot, stored: int) -> int:
    """Return the row-major index of the element at position `stored` of the stored bytes."""
    if stored < 0 or _block_strides(slot) is None:
        return stored
    assert slot.stride is not None
    place = 0
    order = sorted(range(len(slot.shape)), key=lambda axis: -slot.stride[axis])  # type: ignore[index]
    steps = row_major(slot.shape)
    for axis in order:
        if slot.shape[axis] != 1:
            at, stored = divmod(stored, slot.stride[axis])
            place += at * steps[axis]
    return place


def _measure_batch(rows: list[tuple[int, int, int, int, int]], held: object) -> Array:
    measured: Array = measure_pairs(numpy.array(rows, dtype=numpy.int64))
    return measured


def _measure_whole(slots: tuple[Slot, Slot], addresses: tuple[int, int], held: object) -> Array:
    """Measure a pair in pieces: one that is large, or whose sides are stored in different orders."""
    parts = [(start, _measure_dense(slots, one, other)) for start, one, other in _dense_pieces(slots, addresses)]
    raw = _joined(numpy.concatenate([part for _, part in parts]), [start for start, _ in parts])
    raw["bit_identical"] &= slots[0].dtype == slots[1].dtype
    return raw


def _measure_dense(slots: tuple[Slot, Slot], one: Array, other: Array) -> Array:
    codes = [DTYPES[slot.dtype].code for slot in slots]
    return measure_pairs(numpy.array([(one.ctypes.data, other.ctypes.data, one.size, *codes)], dtype=numpy.int64))


def _dense_pieces(slots: tuple[Slot, Slot], addresses: tuple[int, int]) -> Iterator[tuple[int, Array, Array]]:
    """Yield consecutive elements of both sides as raw numbers, with the position of the first; copied if orders differ."""
    sizes = [DTYPES[slot.dtype].itemsize for slot in slots]
    if stored_alike(*slots):
        flat = [
            _memory(address, slots[0].count * size).view(f"V{size}")
            for address, size in zip(addresses, sizes, strict=True)
        ]
        step = PIECE // max(sizes)
        for start in range(0, slots[0].count, step):
            yield start, flat[0][start : start + step], flat[1][start : start + step]
        return
    views = [_strided(slot, address) for slot, address in zip(slots, addresses, strict=True)]
    start = 0
    for index in _pieces(slots[0].shape, max(sizes)):
        one, other = (numpy.ascontiguousarray(view[index]).reshape(-1) for view in views)
        yield start, one, other
        start += one.size


class Apart(NamedTuple):
    """What was set apart of a pair: so many elements, and the statistics of the others on both sides."""

    elements: int
    moments: tuple[Moments, Moments]


def _measure_apart(
    slots: tuple[Slot, Slot], addresses: tuple[int, int], held: object, position: int, found: dict[int, Apart]
) -> Array:
    """Measure a pair without the huge constants that both sides share, as masks have them; they count as zeros.

    What was set apart goes to `found`.
    """
    others, dtypes = other_masks(*slots), (slots[0].dtype, slots[1].dtype)
    ends = mask_values(slots[0]) if others is None else others
    parts, moments, starts, apart = [], [], [], 0
    for start, one, other in _dense_pieces(slots, addresses):
        if others is None:
            blank, dense = blank_masks((one, other), dtypes, ends)
        else:
            blank, dense = blank_other_masks((one, other), dtypes, others)
        parts.append(_measure_dense(slots, *dense))
        rows = [(side.ctypes.data, side.size, DTYPES[slot.dtype].code) for side, slot in zip(dense, slots, strict=True)]
        moments.append((summarize_batch(rows), one.size))
        starts.append(start)
        apart += blank
    joined = [join_moments([(each[side], count) for each, count in moments]) for side in (0, 1)]
    rest = max(abs(end) for side in joined[: 1 if others is None else 2] for end in (side.max, side.min))
    if apart < 2 or not MASK_RATIO * rest <= min(map(abs, ends)):
        return _measure_whole(slots, addresses, held)
    found[position] = Apart(apart, (joined[0], joined[1]))
    raw = _joined(numpy.concatenate(parts), starts)
    raw["finite"] -= apart
    raw["bit_identical"] &= slots[0].dtype == slots[1].dtype and others is None
    return raw


def _joined(parts: Array, starts: list[int]) -> Array:
    return numpy.asarray(join_pairs(list(parts), starts)).reshape(1).astype(RAW)


def _strided(slot: Slot, address: int) -> Array:
    """Return the tensor as raw elements in its logical shape, on the memory of the record."""
    itemsize = DTYPES[slot.dtype].itemsize
    elements = _memory(address, slot.count * itemsize).view(f"V{itemsize}")
    strides = slot.stride if _block_strides(slot) is not None else row_major(slot.shape)
    assert strides is not None
    return numpy.lib.stride_tricks.as_strided(
        elements,
        slot.shape,
        [0 if size == 1 else step * itemsize for step, size in zip(strides, slot.shape, strict=True)],
    )


def _memory(address: int, nbytes: int) -> Array:
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    return numpy.frombuffer(memory, dtype=numpy.uint8)


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Yield index tuples that cut a row-major tensor into pieces of at most about PIECE bytes, in order."""
    axis, inner = 0, math.prod(shape) * itemsize
    while axis < len(shape) and inner // max(shape[axis], 1) > PIECE:
        inner //= max(shape[axis], 1)
        axis += 1
    if inner <= PIECE or axis == len(shape):
        yield ()
        return
    row = max(inner // shape[axis], 1)
    step = max(PIECE // row, 1)
    for outer in numpy.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, start + step))


class RowLists:
    """Columns as lists that grow. The caller, who decides how to measure, fills in those without an underscore but `slot`."""

    def __init__(self) -> None:
        self.slot: list[str] = []
        self.basis: list[int] = []
        self.job: list[int] = []
        self.content: tuple[list[int], list[int]] = ([], [])
        self.layout: list[int] = []
        self.note: list[str] = []
        self.unmeasured: dict[int, Unmeasured] = {}
        self.masked: dict[int, tuple[float, float]] = {}
        """Rows of which each side may have a mask of its own."""
        self.permuted: dict[int, Slot] = {}
        self.distances: dict[int, float] = {}
        """Row → about the norm of its difference, from sketches."""
        """Rows whose values both sides store in the same order, which is not row-major."""
        self._call: list[Array] = []
        self._grad: list[bool] = []
        self._roles: dict[int, str] = {}
        self._digested: list[bool] = []
        self._dtypes: tuple[list[str], list[str]] = ([], [])
        self._shapes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
        self._moments: tuple[list[Array], list[Array]] = ([], [])
        self._known: dict[Any, Any] = {}

    def add(self, left: Sequence[Slot], right: Sequence[Slot], calls: Array) -> bool:
        """Add a row for each pair of slots; `calls` holds the number of its call for each. Return whether shapes and dtypes agree."""
        known = self._known.setdefault  # names, dtypes and shapes repeat: keep one object of each
        self._call.append(calls)
        if any(roles := [slot.role for slot in left]):
            for row, (one, other) in enumerate(zip(roles, right, strict=True), start=len(self.slot)):
                if one and one.partition(" ")[0] == other.role.partition(" ")[0]:
                    self._roles[row] = one
        names = [slot.name for slot in left]
        self.slot.extend(map(known, names, names))
        self._grad += [slot.grad for slot in left]
        digests = [slot.digest for slot in left], [slot.digest for slot in right]
        self._digested.extend(map(_same_kind, *digests))
        dtypes = [slot.dtype for slot in left], [slot.dtype for slot in right]
        shapes = [slot.shape for slot in left], [slot.shape for slot in right]
        for side, slots in enumerate((left, right)):
            self._dtypes[side].extend(map(known, dtypes[side], dtypes[side]))
            self._shapes[side].extend(map(known, shapes[side], shapes[side]))
            self._moments[side].append(
                table_of([_NO_SUMMARY if (held := slot.summary) is None else held for slot in slots])
            )
        return dtypes[0] == dtypes[1] and shapes[0] == shapes[1]

    def leave_out(self, row: int, why: Unmeasured, note: str) -> None:
        """Note that a row cannot be measured."""
        self.basis[row], self.note[row], self.unmeasured[row] = NONE, note, why

    def finish(self, raw: Array, apart: Mapping[int, Apart], directions: Sequence[str]) -> Rows:
        """Return the finished columns; `raw` and `apart` are the kernel's, `directions` those of the calls."""
        sides = {name: code for name in set(self.slot) if (code := _SIDE_CODES.get(name.partition(".")[0], 0)) >= 0}
        call = numpy.concatenate(self._call) if self._call else numpy.zeros(0, dtype=numpy.int64)
        side = numpy.array([sides[name] for name in self.slot], dtype=numpy.int8)
        backward = numpy.array([direction == "backward" for direction in directions], dtype=bool)
        output, parameters = SIDES.index("output"), SIDES.index("parameters")
        basis = numpy.array(self.basis, dtype=numpy.int8)
        content = tuple(numpy.array(side, dtype=numpy.int64) for side in self.content)
        layout = numpy.array(self.layout, dtype=numpy.int64)
        return Rows(
            call=call,
            slot=self.slot,
            side=side,
            made=(side == output) | ((side == parameters) & backward[call]),
            dtypes=(_codes(self._dtypes[0]), _codes(self._dtypes[1])),
            dtype_names=self._dtypes,
            shapes=self._shapes,
            basis=basis,
            content=(content[0], content[1]),
            layout=layout,
            key=number_pairs(content, layout, (basis == VALUES) | (basis == STATISTICS)),
            grad=numpy.array(self._grad, dtype=bool),
            other_bits=numpy.array(self._digested, dtype=bool) & (basis != DIGEST),
            note=self.note,
            figures=self._figures(raw, apart),
            unmeasured=self.unmeasured,
            roles=self._roles,
            masked=set(self.masked),
        )

    def _figures(self, raw: Array, apart: Mapping[int, Apart]) -> dict[str, Array]:
        """Return a column for each figure; rows without values get what digests and statistics say."""
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
        self.masked = {row: masks for row, masks in self.masked.items() if int(job[row]) in apart}
        for row, masks in self.masked.items():
            self.note[row] = "masked by {:g} and by {:g}".format(*masks)
        self._set_apart(columns, job, apart)
        self._fill_equal(columns, basis == DIGEST)
        for row, distance in self.distances.items():
            with numpy.errstate(all="ignore"):
                columns["relative_l2"][row] = distance / columns["baseline_norm"][row]
        _fill_statistics(columns, basis == STATISTICS, numpy.array(self._digested, dtype=bool))
        return columns

    def _set_apart(self, columns: dict[str, Array], job: Array, apart: Mapping[int, Apart]) -> None:
        """Replace the statistics of pairs that hold a mask by those of their other elements."""
        columns["set_apart"] = numpy.zeros(len(job), dtype=numpy.int64)
        for row in numpy.flatnonzero(numpy.isin(job, list(apart))).tolist() if apart else ():
            found = apart[int(job[row])]
            columns["set_apart"][row] = found.elements
            for side, moments in zip(("baseline", "candidate"), found.moments, strict=True):
                for name in ("max", "min", "norm"):
                    columns[f"{side}_{name}"][row] = getattr(moments, name)

    def _fill_equal(self, columns: dict[str, Array], equal: Array) -> None:
        sizes = {shape: int(numpy.prod(shape, dtype=object)) for shape in set(self._shapes[0])}
        counts = numpy.array([max(-1, min(sizes[shape], 2**62)) for shape in self._shapes[0]], dtype=numpy.int64)
        lost = numpy.maximum(columns["baseline_nan"], 0) + numpy.maximum(columns["baseline_inf"], 0)
        columns["count"][equal] = numpy.maximum(counts - lost - columns["set_apart"], 0)[equal]
        for name, figure in FIGURES.items():
            columns[name][equal] = figure.equal


def number_pairs(content: Sequence[Array], layout: Array, differing: Array) -> Array:
    """Return a number for each distinct pair of contents and layouts among the differing rows; -1 for the others."""
    key = numpy.full(len(layout), -1, dtype=numpy.int64)
    if differing.any():
        one, other, laid = (column[differing] for column in (*content, layout))
        code = ((one + 1) * (other.max() + 2) + other + 1) * (laid.max() + 1) + laid
        key[differing] = numpy.unique(code, return_inverse=True)[1]
    return key


def _fill_statistics(columns: dict[str, Array], rows: Array, digested: Array) -> None:
    """Fill in the figures that two summaries give: fewer than the values would."""
    if not rows.any():
        return
    with numpy.errstate(all="ignore"):
        norms = columns["candidate_norm"][rows] / columns["baseline_norm"][rows]
        equal = columns["candidate_norm"][rows] == columns["baseline_norm"][rows]
        columns["norm_ratio"][rows] = numpy.where(equal, 1.0, norms)
        columns["bias"][rows] = columns["candidate_mean"][rows] - columns["baseline_mean"][rows]
    columns["nonfinite_different"][rows] = (_count_difference(columns, "nan") + _count_difference(columns, "inf"))[rows]
    # Without digests, equal statistics are the only evidence of equal bits.
    alike = rows & ~digested
    for name in _MOMENTS:
        ours, theirs = columns[f"baseline_{name}"], columns[f"candidate_{name}"]
        alike &= (ours == theirs) | ((ours != ours) & (theirs != theirs))
    columns["bit_identical"][alike] = True


def _count_difference(columns: dict[str, Array], name: str) -> Array:
    """Return by how much the counts differ. A count of -1 means "some": it differs from 0 only."""
    ours, theirs = columns[f"baseline_{name}"], columns[f"candidate_{name}"]
    uncounted = (ours < 0) | (theirs < 0)
    return numpy.where(uncounted, (ours == 0) | (theirs == 0), abs(theirs - ours))


def _same_kind(one: str | None, other: str | None) -> bool:
    """Return whether two digests can be compared: digests of other tools have their kind before a colon."""
    if one is None or other is None:
        return False
    return (":" not in one and ":" not in other) or one.rpartition(":")[0] == other.rpartition(":")[0]


def _whole(values: Array) -> Array:
    """Return counts from disk as 64-bit integers, clipped: they may be absurd."""
    return numpy.clip(values, -1, 2.0**62).astype(numpy.int64)


def _codes(names: Sequence[str]) -> Array:
    return numpy.array([_DTYPE_CODES.get(name, UNKNOWN_DTYPE) for name in names], dtype=numpy.int16)

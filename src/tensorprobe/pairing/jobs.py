"""Pairs of tensors on their way through the kernel: each distinct pair once, small ones in batches, large ones in pieces.

In: pairs of slots with values and where these come from. Out: one row of raw figures for each distinct pair, in the order in
which they were added. How a pair is cut depends on its size alone, so the figures do not depend on the number of
threads. Tensors are read in place; what is copied (strides that differ) stays within `PIECE` bytes at a time.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy

from tensorprobe.model import DTYPES, Slot
from tensorprobe.numerics.pairs import RAW, join_pairs, measure_pairs
from tensorprobe.record.blob import ByteSource
from tensorprobe.record.elements import is_dense

PIECE = 32 << 20
"""Bytes of one side that are measured in one go."""
BATCH_BYTES = 8 << 20
BATCH_PAIRS = 2048
_WAITING = 4
"""Batches for each thread that may wait, so that reading the index does not run far ahead."""

Array = numpy.ndarray[Any, Any]


class Jobs:
    """Collects pairs and measures them in `threads` threads; `results()` ends it."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tensorprobe-measure")
        self._waiting: deque[Future[Array]] = deque()
        self._limit = _WAITING * threads
        self._done: list[Array] = []
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._held: dict[int, object] = {}
        self._bytes = 0
        self.count = 0

    def add(self, slots: tuple[Slot, Slot], sources: tuple[ByteSource, ByteSource]) -> int:
        """The number of the pair. Its sides have equal shapes and known dtypes. TensorDamaged as `ByteSource.hold`."""
        (address_a, held_a), (address_b, held_b) = sources[0].hold(slots[0]), sources[1].hold(slots[1])
        one, other = DTYPES[slots[0].dtype], DTYPES[slots[1].dtype]
        nbytes = slots[0].nbytes
        self.count += 1
        if (slots[0].stride is None and slots[1].stride is None) or stored_alike(*slots):
            row = (address_a, address_b, nbytes // one.itemsize, one.code, other.code)
            if nbytes <= PIECE:
                self._append(row, held_a, held_b, nbytes)
            else:
                self._submit_alone(_measure_pieces, row, (held_a, held_b), one.itemsize, other.itemsize)
        else:
            self._submit_alone(_measure_gathered, slots, (address_a, address_b), (held_a, held_b))
        return self.count - 1

    def results(self) -> Array:
        """The raw figures of all pairs, in the order of `add`."""
        self._flush()
        while self._waiting:
            self._done.append(self._waiting.popleft().result())
        self._pool.shutdown()
        return numpy.concatenate(self._done) if self._done else numpy.empty(0, RAW)

    def abandon(self) -> None:
        """Stop the threads; nothing is returned."""
        self._pool.shutdown(cancel_futures=True)

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
    """Whether element i of the stored bytes is the same element of the tensor on both sides; shapes are equal."""
    return _block_strides(baseline) == _block_strides(candidate)


def _block_strides(slot: Slot) -> tuple[int, ...] | None:
    """The strides of the stored block over the dimensions that count, None when it is row-major."""
    if slot.stride is None or not slot.count or not is_dense(slot.shape, slot.stride):
        return None
    strides = tuple(step for step, size in zip(slot.stride, slot.shape, strict=True) if size != 1)
    sizes = tuple(size for size in slot.shape if size != 1)
    return None if strides == tuple(row_major(sizes)) else strides


def row_major(shape: tuple[int, ...]) -> list[int]:
    """The strides of a contiguous tensor, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def logical_index(slot: Slot, stored: int) -> int:
    """The row-major index of the element that stands at `stored` in the stored bytes."""
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


def _measure_pieces(row: tuple[int, int, int, int, int], held: object, size_a: int, size_b: int) -> Array:
    address_a, address_b, count, code_a, code_b = row
    step = PIECE // max(size_a, size_b)
    starts = list(range(0, count, step))
    rows = [
        (address_a + start * size_a, address_b + start * size_b, min(step, count - start), code_a, code_b)
        for start in starts
    ]
    return _joined(measure_pairs(numpy.array(rows, dtype=numpy.int64)), starts)


def _measure_gathered(slots: tuple[Slot, Slot], addresses: tuple[int, int], held: object) -> Array:
    """A pair whose sides are stored in different orders: pieces of both are brought into row-major order first."""
    codes = [DTYPES[slot.dtype].code for slot in slots]
    views = [_strided(slot, address) for slot, address in zip(slots, addresses, strict=True)]
    parts, starts, start = [], [], 0
    for index in _pieces(slots[0].shape, max(view.itemsize for view in views)):
        dense = [numpy.ascontiguousarray(view[index]) for view in views]
        row = (dense[0].ctypes.data, dense[1].ctypes.data, dense[0].size, *codes)
        parts.append(measure_pairs(numpy.array([row], dtype=numpy.int64)))
        starts.append(start)
        start += dense[0].size
    raw = _joined(numpy.concatenate(parts), starts)
    raw["bit_identical"] &= slots[0].dtype == slots[1].dtype
    return raw


def _joined(parts: Array, starts: list[int]) -> Array:
    return numpy.asarray(join_pairs(list(parts), starts)).reshape(1).astype(RAW)


def _strided(slot: Slot, address: int) -> Array:
    """The tensor as bare elements of its size, in its logical shape, on the memory of the record."""
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
    """Index tuples that cut a row-major tensor into pieces of at most about PIECE bytes, in order."""
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

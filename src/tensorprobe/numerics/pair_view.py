"""Two arrays of one shape, read block by block as float64: what looks for patterns, histograms and pictures stands on this.

In: arrays on mapped files, and how to widen their elements. Out: blocks of bounded size with their difference. A tensor of any
size is looked at without being in memory as a whole. An element that is NaN or infinite on one side only has an infinite
difference; equal infinities and equal NaN have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Numbers = NDArray[np.float64]
Index = tuple[slice, ...]

BLOCK = 1 << 20
"""Elements in a block."""
COMPLEX_PARTS = 2


@dataclass(frozen=True)
class Block:
    """A part of both arrays: where it stands, its values, and the size of the difference."""

    index: Index
    baseline: Numbers
    candidate: Numbers
    error: Numbers

    @property
    def start(self) -> list[int]:
        """The index of its first element."""
        return [part.start for part in self.index]


@dataclass
class PairView:
    """Two arrays side by side. `eps` is the spacing of the coarser dtype at 1, 0 for integers."""

    baseline: Array
    candidate: Array
    eps: float = 0.0
    tiny: float = 0.0
    """The smallest normal number of that dtype."""
    widen: tuple[Callable[[Array], Array], Callable[[Array], Array]] = (np.asarray, np.asarray)
    _held: Block | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both. The parts of complex numbers are an axis of their own."""
        extra = (COMPLEX_PARTS,) if self._is_complex else ()
        return (*self.baseline.shape, *extra)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def _is_complex(self) -> bool:
        return any(side(held[(slice(0, 0),) * held.ndim]).dtype.kind == "c" for side, held in self._sides())

    def _sides(self) -> tuple[tuple[Callable[[Array], Array], Array], ...]:
        return (self.widen[0], self.baseline), (self.widen[1], self.candidate)

    def blocks(self, most: int = BLOCK) -> Iterator[Block]:
        """Yield all elements, in row-major order of blocks. The only block of a small pair is kept."""
        if self._held is not None:
            yield self._held
            return
        indices = list(_split(self.baseline.shape, most))
        for index in indices:
            block = self.block(index)
            if len(indices) == 1:
                self._held = block
            yield block

    def block(self, index: Index) -> Block:
        """Return the elements of a part; `index` has a slice for each axis of the arrays."""
        given = [side(held[index]) for side, held in self._sides()]
        if {"c"} < {values.dtype.kind for values in given}:  # a real number is a complex one
            given = [values.astype(np.complex128) for values in given]
        first, second = (_as_float(values) for values in given)
        with np.errstate(all="ignore"):
            error = np.asarray(np.abs(second - first))  # of single numbers numpy makes no array
            if all(values.dtype.kind in "iu" for values in given):  # large ones are rounded to float64
                error[(given[0] != given[1]) & (error == 0)] = 1.0
            odd = ~np.isfinite(error)
            if odd.any():
                same = (first == second) | (np.isnan(first) & np.isnan(second))
                error[odd] = np.where(same[odd], 0.0, np.inf)
        extra = (slice(0, COMPLEX_PARTS),) if first.ndim > len(index) else ()
        return Block((*index, *extra), first, second, error)


def _as_float(values: Array) -> Numbers:
    if values.dtype.kind == "c":
        values = np.ascontiguousarray(values).view(values.real.dtype).reshape(*values.shape, COMPLEX_PARTS)
    return np.asarray(values, dtype=np.float64)


def _split(shape: tuple[int, ...], most: int) -> Iterator[Index]:
    """Yield parts of at most about `most` elements that cover the shape, outermost axes first."""
    if not shape:
        yield ()
        return
    inner = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, most // max(inner, 1))
    for start in range(0, shape[0], step) if shape[0] else (0,):
        own = slice(start, min(start + step, shape[0]))
        if inner <= most:
            yield (own, *(slice(0, size) for size in shape[1:]))
        else:
            yield from ((own, *rest) for rest in _split(shape[1:], most))

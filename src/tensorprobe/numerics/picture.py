"""Two tensors as small matrices for a heat map: each cell stands for a block and shows the element that differs most.

In: a `PairView`. Out: `Picture`s of at most `most` by `most` cells. One wrong element among millions stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tensorprobe.model.diff import Picture
from tensorprobe.numerics.pair_view import Array, PairView
from tensorprobe.packing import pack_numbers

CELLS = 128
"""The most rows and columns of a picture."""
_FOLD = 128
"""A vector with more than twice as many elements is folded into rows of this length."""
_ROWS = 1 << 20
"""Elements that are in memory at a time."""


def picture_of(pair: PairView, *, fixed: Sequence[int] = (), most: int = CELLS) -> Picture:
    """Return a picture of the whole pair, or of the slice at the `fixed` indices of its leading axes.

    The last axis runs from left to right. The others are folded into rows, and a vector is folded too.
    """
    at = tuple(fixed)
    first, second = pair.baseline[at], pair.candidate[at]
    shape = first.shape
    if first.ndim == 1 and len(first) > 2 * _FOLD:
        width, folded = _FOLD, (_padded(first), _padded(second))
    else:
        width = shape[-1] if shape else 1
        folded = (first.reshape(-1, width) if width else first.reshape(0, 1), second.reshape(-1, width or 1))
    flat = PairView(*folded, eps=pair.eps, tiny=pair.tiny, widen=pair.widen)
    height = folded[0].shape[0]
    row_block, column_block = (max(1, -(-size // most)) for size in (height, width))
    cells = _pooled(flat, row_block, column_block, extra=folded[0].size - first.size)
    leading = len(pair.shape) - len(pair.baseline.shape)  # the parts of complex numbers are shown side by side
    return Picture(
        title=_title(at, first.ndim),
        rows=cells[0].shape[0],
        columns=cells[0].shape[1],
        row_axes=list(range(len(at), len(at) + max(first.ndim - 1, 0))),
        row_block=row_block,
        column_block=column_block,
        height=height,
        width=width << leading,
        planes=[pack_numbers(plane) for plane in cells],
        fixed=list(at),
    )


def _title(fixed: tuple[int, ...], rest: int) -> str:
    if not fixed:
        return "whole tensor"
    return f"[{', '.join([*map(str, fixed), *[':'] * rest])}]"


def _padded(values: Array) -> Array:
    missing = -len(values) % _FOLD
    return np.concatenate([values, np.repeat(values[-1:], missing)]).reshape(-1, _FOLD)


def _pooled(pair: PairView, row_block: int, column_block: int, *, extra: int) -> list[Array]:
    """Return baseline, candidate and difference of the worst element in each block. The last `extra` elements do not count."""
    height, width = pair.shape[:2]
    depth = math.prod(pair.shape[2:])
    rows, columns = -(-height // row_block), -(-width * depth // column_block)
    planes = [np.zeros((rows, columns)) for _ in range(3)]
    together = max(1, _ROWS // max(1, row_block * width))
    for start in range(0, rows, together):
        stop = min(start + together, rows)
        low, high = start * row_block, min(stop * row_block, height)
        block = pair.block((slice(low, high), slice(0, width)))
        sides = [side.reshape(high - low, -1) for side in (block.baseline, block.candidate, block.error)]
        if extra and high == height:
            sides[2][-1, sides[2].shape[1] - extra :] = -1.0
        room = ((0, (stop - start) * row_block - (high - low)), (0, columns * column_block - sides[0].shape[1]))
        first, second, error = (
            _blocks(np.pad(side, room, constant_values=fill), row_block, column_block)
            for side, fill in zip(sides, (0.0, 0.0, -1.0), strict=True)
        )
        worst = error.argmax(axis=-1)[..., None]
        values = [np.take_along_axis(side, worst, axis=-1)[..., 0] for side in (first, second)]
        planes[0][start:stop], planes[1][start:stop] = values
        with np.errstate(all="ignore"):
            planes[2][start:stop] = np.where(
                (values[0] == values[1]) | (np.isnan(values[0]) & np.isnan(values[1])), 0.0, values[1] - values[0]
            )
    return planes


def _blocks(values: Array, row_block: int, column_block: int) -> Array:
    rows, columns = values.shape[0] // row_block, values.shape[1] // column_block
    cut = values.reshape(rows, row_block, columns, column_block).swapaxes(1, 2)
    return cut.reshape(rows, columns, row_block * column_block)

"""Huge constants that two tensors share, such as the -3.4e38 of an attention mask. They would swamp every norm.

Errors are measured over the other elements. A value is set apart when it is an extreme of the tensor, stands in several places,
is equal bit for bit on both sides, and is far larger than everything else. Two programs may have other masks, -3.4e38 and -1e9:
then elements are set apart that are masked on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorprobe.model import Slot

Array = np.ndarray[Any, Any]

LEAST_MASK = 8192.0
"""Smaller values are no masks. Common ones are -1e4, -1e9 and the smallest number of a dtype."""
MASK_RATIO = 1e3
"""How many times larger than all other elements a mask is."""
_BITS = {"float16": "<u2", "bfloat16": "<u2", "float32": "<u4", "float64": "<u8"}


def mask_values(slot: Slot) -> tuple[float, ...]:
    """Return the extremes of a tensor that may be masks; nothing for nearly all tensors."""
    summary = slot.summary
    if summary is None:
        return ()
    least, most = summary.min, summary.max
    if (-LEAST_MASK < least < LEAST_MASK and -LEAST_MASK < most < LEAST_MASK) or slot.dtype not in _BITS:  # type: ignore[operator]
        return ()
    ends = {float(least), float(most)}
    return tuple(end for end in ends if LEAST_MASK <= abs(end) < float("inf"))


def other_masks(ours: Slot, theirs: Slot) -> tuple[float, float] | None:
    """Return the masks of two tensors with another mask each, which may be -inf; None for nearly all pairs."""
    if ours.summary is None or theirs.summary is None:
        return None
    ends = float(ours.summary.min), float(theirs.summary.min)
    if ends[0] > -LEAST_MASK or ends[1] > -LEAST_MASK or {ours.dtype, theirs.dtype} - _BITS.keys():
        return None
    return ends if ends[0] != ends[1] and max(ends) <= -LEAST_MASK and min(map(abs, ends)) < float("inf") else None


def blank_other_masks(
    sides: tuple[Array, Array], dtypes: tuple[str, str], ends: tuple[float, float]
) -> tuple[int, list[Array]]:
    """Return how many elements are masked on both sides, each by its own mask, and copies of the sides with zeros there."""
    bits = [side.view(_BITS[dtype]) for side, dtype in zip(sides, dtypes, strict=True)]
    masked = [
        _numbers(side, dtype) <= (end / 2 if end > -np.inf else -LEAST_MASK)
        for side, dtype, end in zip(bits, dtypes, ends, strict=True)
    ]
    apart = masked[0] & masked[1]
    return int(apart.sum()), [np.where(apart, side.dtype.type(0), side) for side in bits]


def _numbers(bits: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (bits.astype("<u4") << 16).view("<f4")
    return bits.view(f"<f{bits.itemsize}")


def blank_masks(
    sides: tuple[Array, Array], dtypes: tuple[str, str], values: Sequence[float]
) -> tuple[int, list[Array]]:
    """Return how many elements have one of these values on both sides, and copies of the sides with zeros there.

    The sides are raw numbers in one dimension.
    """
    bits = [side.view(_BITS.get(dtype, f"u{side.itemsize}")) for side, dtype in zip(sides, dtypes, strict=True)]
    apart = np.zeros(len(bits[0]), dtype=bool)
    for value in values:
        wanted = [_bits_of(value, dtype) for dtype in dtypes]
        if None not in wanted:
            apart |= (bits[0] == wanted[0]) & (bits[1] == wanted[1])
    return int(apart.sum()), [np.where(apart, side.dtype.type(0), side) for side in bits]


def _bits_of(value: float, dtype: str) -> int | None:
    """Return the bits of a value in a dtype; None where it is not exactly representable."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            wide = int(np.float32(value).view(np.uint32))
            return wide >> 16 if not wide & 0xFFFF and float(np.float32(value)) == value else None
        if dtype not in _BITS:
            return None
        narrow = np.dtype(dtype).type(value)
        return int(narrow.view(_BITS[dtype])) if float(narrow) == value else None

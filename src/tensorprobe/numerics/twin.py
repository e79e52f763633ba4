"""The portable twin of the native kernel, in numpy: the same functions, the same results bit for bit.

The order of summation is part of the contract (`twin_blocks`), so a figure does not depend on which machine, or which of
the two, computed it. Statistics of one tensor are here, those of a pair in `twin_pairs`.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator

import numpy as np

from tensorprobe.model.dtypes import BY_CODE, DType
from tensorprobe.numerics.pairs import HUGE_SCALE, TINY_SCALE
from tensorprobe.numerics.twin_blocks import (
    CHUNK,
    LANES,
    Values,
    add_blocks,
    check,
    fold,
    stored_values,
    whole_blocks,
    widen,
)
from tensorprobe.numerics.twin_pairs import PAIR_BYTES, measure_pairs

__all__ = ["PAIR_BYTES", "copy", "features", "glance", "measure_pairs", "peak", "summarize", "summarize_many"]

_ROW_BYTES = 24
PEAK_CODES = frozenset(
    dtype.code
    for dtype in BY_CODE
    if dtype.kind in ("float", "complex") and dtype.name not in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)
"""Dtypes whose bits, without the sign, are ordered as the magnitudes are, with NaN on top."""

TINY_SQUARES = 2.0**-960
"""Below this sum of squares of float64 values, single squares may have been lost to underflow."""

Figures = tuple[float, float, float, float, int, int]


def features() -> tuple[str, ...]:
    """Return the vector instructions in use: none that we know of."""
    return ()


def summarize(address: int, count: int, code: int) -> Figures:
    """Return (max, min, mean, norm, nan, inf) of `count` elements of dtype `code`; raise ValueError for bad arguments."""
    check(address, count, code)
    if count == 0:
        return (math.nan, math.nan, math.nan, math.nan, 0, 0)
    dtype = BY_CODE[code]
    with np.errstate(all="ignore"):
        return _figures(stored_values(address, count, dtype), dtype)


def summarize_many(rows_address: int, n: int, out_address: int) -> None:
    """Summarize n rows of int64 (address, count, code); write n rows of 4 float64 and 2 int64.

    ValueError, before anything is written, if any row is bad.
    """
    if n < 0:
        raise ValueError(f"negative number of rows: {n}")
    if n and min(rows_address, out_address) <= 0:
        raise ValueError("null address")
    rows = list(struct.iter_unpack("3q", ctypes.string_at(rows_address, _ROW_BYTES * n)))
    for number, row in enumerate(rows):
        check(*row, where=f"row {number}: ")
    for number, row in enumerate(rows):
        figures = struct.pack("4d2q", *summarize(*row))
        ctypes.memmove(out_address + len(figures) * number, figures, len(figures))


def peak(address: int, count: int, code: int) -> int:
    """Return the bits of the greatest magnitude, without its sign; raise ValueError for a dtype without peaks."""
    check(address, count, code)
    if code not in PEAK_CODES:
        raise ValueError(f"dtype code without a peak: {code}")
    stored = stored_values(address, count, BY_CODE[code])
    words = stored.view(f"<u{stored.itemsize}")
    magnitude = (1 << (8 * stored.itemsize - 1)) - 1
    return max((int((words[at : at + CHUNK] & magnitude).max()) for at in range(0, words.size, CHUNK)), default=0)


def copy(dst_address: int, src_address: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between ranges that do not overlap."""
    if nbytes < 0:
        raise ValueError(f"negative number of bytes: {nbytes}")
    if nbytes and min(dst_address, src_address) <= 0:
        raise ValueError("null address")
    ctypes.memmove(dst_address, src_address, nbytes)


def _figures(stored: Values, dtype: DType) -> Figures:
    high, low, nan, inf = -math.inf, math.inf, 0, 0
    for wide in _chunks(stored, dtype):
        is_nan = np.isnan(wide)
        nan += int(is_nan.sum())
        inf += int(np.isinf(wide).sum())
        # Not fmax and fmin: they return a signalling NaN, which random bits in a record may well hold.
        high = max(high, float(np.where(is_nan, -math.inf, wide).max()))
        low = min(low, float(np.where(is_nan, math.inf, wide).min()))
    finite = stored.size - nan - inf
    if stored.size == nan:
        return (math.nan, math.nan, math.nan, math.nan, nan, inf)
    if finite == 0:
        return (high, low, math.nan, math.nan, nan, inf)
    total, squares = _sums(stored, dtype, 1.0)
    mean, norm = total / finite, math.sqrt(squares)
    scale = _rescue_scale(stored, squares, all_zero=high == low == 0)
    if scale != 1.0:
        scaled_total, scaled_squares = _sums(stored, dtype, scale)
        norm = math.sqrt(scaled_squares) / scale
        if not math.isfinite(total):
            mean = scaled_total / finite / scale
    # Adding zero makes -0.0 a plain zero: which of two equal zeros a minimum returns depends on the order.
    return (high + 0.0, low + 0.0, mean + 0.0, norm, nan, inf)


def _rescue_scale(stored: Values, squares: float, *, all_zero: bool) -> float:
    """Return the factor with which squares neither overflow nor underflow; 1 for nearly every tensor."""
    if stored.dtype.str != "<f8" or all_zero:
        return 1.0
    if squares == math.inf:
        return HUGE_SCALE
    return TINY_SCALE if squares < TINY_SQUARES else 1.0


def _sums(stored: Values, dtype: DType, scale: float) -> tuple[float, float]:
    """Sum the finite values times `scale`, and their squares, in the order of the contract."""
    total, squares = np.zeros(LANES), np.zeros(LANES)
    for wide in _chunks(stored, dtype):
        values = whole_blocks(np.where(np.isfinite(wide), wide, 0.0) * scale)
        total = add_blocks(total, values)
        squares = add_blocks(squares, values * values)
    return float(fold(total)), float(fold(squares))


def _chunks(stored: Values, dtype: DType) -> Iterator[Values]:
    """Yield the values as float64, a bounded number at a time."""
    for start in range(0, stored.size, CHUNK):
        yield widen(stored[start : start + CHUNK], dtype)


def glance(baseline: int, candidate: int, count: int, baseline_code: int, candidate_code: int) -> None:
    """Return None, "look closer", always: without native code a first look is no faster than a full one."""
    for address, code in ((baseline, baseline_code), (candidate, candidate_code)):
        check(address, count, code)

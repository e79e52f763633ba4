"""The greatest magnitude in a tensor from one pass of integer maxima, and what it says: finite, at the limit, infinite, NaN.

A peak is the bits of a value without its sign. Peaks of one dtype are ordered as the magnitudes are, infinity above every
number and NaN above infinity. Three float8 dtypes put NaN elsewhere and have no peak.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import NamedTuple

from tensorprobe.model.dtypes import DType
from tensorprobe.numerics import float8
from tensorprobe.numerics.native import implementation


class Limits(NamedTuple):
    """Peaks that part the numbers of a dtype: the greatest finite one, the first that is not finite, the first NaN."""

    greatest: int
    infinite: int
    nan: int


_HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_LIMITS = {
    "float64": Limits(0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0001),
    "float32": Limits(0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001),
    "bfloat16": Limits(0x7F7F, 0x7F80, 0x7F81),
    "float16": Limits(0x7BFF, 0x7C00, 0x7C01),
    "float8_e5m2": Limits(0x7B, 0x7C, 0x7D),
    "float8_e4m3fn": Limits(0x7E, 0x7F, 0x7F),
}
LIMITS: dict[str, Limits] = {**_LIMITS, **{name: _LIMITS[half] for name, half in _HALVES.items()}}
"""By the names of the dtypes that have peaks."""


def peak_at(address: int, count: int, dtype: DType) -> int:
    """The peak of `count` elements at `address`; 0 when there are none."""
    return int(implementation().peak(address, count, dtype.code))


def magnitude(peak: int, dtype: str) -> float:
    """The number that a peak of this dtype stands for."""
    dtype = _HALVES.get(dtype, dtype)
    if dtype == "bfloat16":
        return float(struct.unpack("<f", struct.pack("<I", peak << 16))[0])
    if dtype in float8.NAMES:
        return float(float8.decode_table(dtype)[peak])
    code, word = {"float64": ("<d", "<Q"), "float32": ("<f", "<I"), "float16": ("<e", "<H")}[dtype]
    return float(struct.unpack(code, struct.pack(word, peak))[0])


def peak_of_number(value: float, dtype: str) -> int:
    """The least peak of the dtype whose magnitude is at least that of `value`."""
    limits = LIMITS[dtype]
    if math.isnan(value):
        return limits.nan
    return limits.infinite if math.isinf(value) else first_peak_over(abs(value), dtype)


@cache
def greatest_finite(dtype: str) -> float:
    """The greatest number of a dtype: 65504 for float16; NaN for a dtype that has no peaks."""
    return magnitude(LIMITS[dtype].greatest, dtype) if dtype in LIMITS else math.nan


def first_peak_over(value: float, dtype: str) -> int:
    """The least peak whose magnitude is at least `value`."""
    low, high = 0, LIMITS[dtype].infinite
    while low < high:
        middle = (low + high) // 2
        if magnitude(middle, dtype) >= value:
            high = middle
        else:
            low = middle + 1
    return low

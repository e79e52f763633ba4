"""The portable twin of `measure_pairs` of the native kernel, in numpy: the same figures, bit for bit.

The rules of the figures stand in `_pairs.h` and `_distance.h`; here they are written down once more, as plainly as numpy
allows. The order of summation is that of `twin_blocks`; distances in ULP are folded for each block.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tensorprobe.model.dtypes import BY_CODE, DType
from tensorprobe.numerics.pairs import HUGE_SCALE, RAW, TINY_SCALE
from tensorprobe.numerics.twin_blocks import (
    CHUNK,
    LANES,
    Values,
    add_blocks,
    check,
    fold,
    lanes_of_blocks,
    stored_values,
    whole_blocks,
    widen,
)

TOLERANCES = (1e-4, 1e-3, 5e-3, 1e-2)
TINY_PAIR = 2.0**-600
"""Below this sum of squares, squares of differences of float64 values may be lost to underflow."""

_ROW = struct.Struct("5q")
_FIGURES = struct.Struct("".join(RAW[name].char.replace("l", "q") for name in RAW.names or ()))
PAIR_BYTES = _FIGURES.size
_MAGNITUDE = (1 << 63) - 1
_ONE = 1 << 52
"""In the bits of a float64: one step of the exponent."""


class _Format(NamedTuple):
    """Of a float: bits of its mantissa, and the least exponent of a normal number."""

    mantissa: int
    least_exponent: int


_FORMATS = {
    "float32": _Format(23, -126),
    "float64": _Format(52, -1022),
    "bfloat16": _Format(7, -126),
    "float16": _Format(10, -14),
    "complex32": _Format(10, -14),
    "complex64": _Format(23, -126),
    "complex128": _Format(52, -1022),
    "float8_e4m3fn": _Format(3, -6),
    "float8_e5m2": _Format(2, -14),
    "float8_e4m3fnuz": _Format(3, -7),
    "float8_e5m2fnuz": _Format(2, -15),
    "float8_e8m0fnu": _Format(0, -127),
}


class _Side(NamedTuple):
    stored: Values
    dtype: DType

    @property
    def parts(self) -> int:
        return 2 if self.dtype.kind == "complex" else 1

    @property
    def format(self) -> _Format | None:
        """None for integers."""
        return _FORMATS.get(self.dtype.name)


class _Pair(NamedTuple):
    baseline: _Side
    candidate: _Side
    elements: int

    @property
    def parts(self) -> int:
        return max(self.baseline.parts, self.candidate.parts)

    @property
    def format(self) -> _Format | None:
        """The one in which distances are counted: the coarser."""
        found = [side.format for side in (self.baseline, self.candidate) if side.format is not None]
        return min(found, key=lambda one: (one.mantissa, -one.least_exponent), default=None)

    @property
    def narrow(self) -> bool:
        """Whether the kernel works on floats, and so tests tolerances in float32."""
        formats = self.baseline.format, self.candidate.format
        if None in formats or any(one and one.mantissa == 52 for one in formats):
            return False
        alike = formats[0] == formats[1] or all(one and one.least_exponent == -126 for one in formats)
        return alike and self.baseline.parts == self.candidate.parts


@dataclass
class _Tally:
    """Everything that is counted in one pass."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    ulp_max: float = 0.0
    ulp_sum: float = 0.0
    max_abs_index: int = -1
    finite: int = 0
    different: int = 0
    within: list[int] = field(default_factory=lambda: [0] * len(TOLERANCES))
    ulp_over_1: int = 0
    ulp_over_4: int = 0
    nonfinite_different: int = 0
    nonfinite_index: int = -1
    nonfinite: list[int] = field(default_factory=lambda: [0] * 4)
    """NaN of the baseline and of the candidate, infinities of both."""


def measure_pairs(rows_address: int, n: int, out_address: int) -> None:
    """Measure n rows of int64 (baseline address, candidate address, count, baseline code, candidate code).

    Writes n rows of `RAW`. ValueError, before anything is written, if any row is bad.
    """
    if n < 0:
        raise ValueError(f"negative number of rows: {n}")
    if n and min(rows_address, out_address) <= 0:
        raise ValueError("null address")
    rows = list(_ROW.iter_unpack(ctypes.string_at(rows_address, _ROW.size * n)))
    for number, (baseline, candidate, count, baseline_code, candidate_code) in enumerate(rows):
        check(baseline, count, baseline_code, where=f"row {number}: ")
        check(candidate, count, candidate_code, where=f"row {number}: ")
    for number, (baseline, candidate, count, baseline_code, candidate_code) in enumerate(rows):
        left, right = BY_CODE[baseline_code], BY_CODE[candidate_code]
        pair = _Pair(
            _Side(stored_values(baseline, count, left), left),
            _Side(stored_values(candidate, count, right), right),
            count,
        )
        with np.errstate(all="ignore"):
            figures = _FIGURES.pack(*_figures(pair))
        ctypes.memmove(out_address + _FIGURES.size * number, figures, _FIGURES.size)


def _figures(pair: _Pair) -> tuple[float, ...]:
    """Return the fields of `PairFigures` in its order."""
    tally = _Tally()
    for start, a, b, d in _chunks(pair):
        _count_nonfinite(tally, start // pair.parts, pair.parts, a, b)
        finite = np.isfinite(a) & np.isfinite(b)
        _measure_errors(tally, pair, start, a, b, d, finite)
        _measure_distances(tally, pair.format, np.where(finite, a, 0.0), np.where(finite, b, 0.0), d)
    scale = 1.0
    sums = _sums(pair, scale)
    if tally.finite and (rescue := _rescue_scale(pair, sums)) != 1.0:
        sums = _sums(pair, rescue)
        scale = rescue if any(sums[:2]) else 1.0
    return (
        *(*sums, tally.max_abs, tally.max_rel, tally.ulp_max, tally.ulp_sum, scale),
        *(tally.max_abs_index, tally.finite, tally.different + tally.nonfinite_different, *tally.within),
        *(tally.ulp_over_1, tally.ulp_over_4, tally.nonfinite_different, tally.nonfinite_index, *tally.nonfinite),
        _bit_identical(pair),
    )


def _bit_identical(pair: _Pair) -> int:
    left, right = pair.baseline, pair.candidate
    return int(left.dtype == right.dtype and np.array_equal(left.stored.view("u1"), right.stored.view("u1")))


def _chunks(pair: _Pair, scale: float = 1.0) -> Iterator[tuple[int, Values, Values, Values]]:
    """Number of the first value, baseline, candidate and difference (0 where one is not finite), a bounded number at a time."""
    step = CHUNK // pair.parts
    for start in range(0, pair.elements, step):
        stop = min(start + step, pair.elements)
        a, b = (_widen_part(side, start, stop, pair.parts) * scale for side in (pair.baseline, pair.candidate))
        if pair.format is None and 8 in (pair.baseline.dtype.itemsize, pair.candidate.dtype.itemsize):
            d = _subtract_integers(_integers(pair.baseline, start, stop), _integers(pair.candidate, start, stop))
        else:
            d = np.clip(b - a, -sys.float_info.max, sys.float_info.max)
        yield start * pair.parts, a, b, np.where(np.isfinite(a) & np.isfinite(b), d, 0.0)


def _widen_part(side: _Side, start: int, stop: int, parts: int) -> Values:
    """Return elements `start` to `stop` as float64; real numbers beside complex ones get an imaginary part of zero."""
    values = widen(side.stored[start * side.parts : stop * side.parts], side.dtype)
    return np.stack([values, np.zeros_like(values)], axis=1).ravel() if parts > side.parts else values


def _integers(side: _Side, start: int, stop: int) -> tuple[Values, Values]:
    """Return which of the elements are negative, and the magnitudes as uint64."""
    stored = side.stored[start:stop]
    if side.dtype.kind == "bool":
        stored = stored != 0
    if side.dtype.name == "uint64":
        return np.zeros(stored.size, bool), stored.astype("u8")
    numbers = stored.astype("i8")
    magnitudes = numbers.view("u8")
    return numbers < 0, np.where(numbers < 0, np.uint64(0) - magnitudes, magnitudes)


def _subtract_integers(baseline: tuple[Values, Values], candidate: tuple[Values, Values]) -> Values:
    (x_negative, u), (y_negative, v) = baseline, candidate
    apart = np.where(v >= u, (v - u).astype("f8"), -(u - v).astype("f8"))
    d = np.where(x_negative != y_negative, v.astype("f8") + u.astype("f8"), apart)
    return np.where(y_negative, -d, d)


def _count_nonfinite(tally: _Tally, start: int, parts: int, a: Values, b: Values) -> None:
    counts = (np.isnan(a), np.isnan(b), np.isinf(a), np.isinf(b))
    tally.nonfinite = [total + int(mask.sum()) for total, mask in zip(tally.nonfinite, counts, strict=True)]
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    places = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)) & ~same)
    tally.nonfinite_different += places.size
    if places.size and tally.nonfinite_index < 0:
        tally.nonfinite_index = start + int(places[0]) // parts


def _measure_errors(tally: _Tally, pair: _Pair, start: int, a: Values, b: Values, d: Values, finite: Values) -> None:
    error, size = np.abs(d), np.abs(a)
    tally.finite += int(finite.sum())
    tally.different += int(np.count_nonzero(d))
    if (greatest := float(error.max())) > tally.max_abs:
        tally.max_abs, tally.max_abs_index = greatest, (start + int(error.argmax())) // pair.parts
    divisible = finite & (size != 0)
    tally.max_rel = max(tally.max_rel, float((error[divisible] / size[divisible]).max(initial=0.0)))
    if pair.narrow:
        size = size.astype("f4")
        error = np.abs(b.astype("f4") - a.astype("f4"))
    for place, tolerance in enumerate(TOLERANCES):
        tally.within[place] += int((finite & (error <= size.dtype.type(tolerance) * size)).sum())


def _measure_distances(tally: _Tally, format: _Format | None, a: Values, b: Values, d: Values) -> None:
    ulps = np.abs(d) if format is None else _distances(a, b, format)
    tally.ulp_max = max(tally.ulp_max, float(ulps.max()))
    for of_block in fold(lanes_of_blocks(whole_blocks(ulps))):
        tally.ulp_sum += float(of_block)
    tally.ulp_over_1 += int((ulps > 1).sum())
    tally.ulp_over_4 += int((ulps > 4).sum())


def _distances(a: Values, b: Values, format: _Format) -> Values:
    p, q = _ordinals(a, format), _ordinals(b, format)
    return np.where(p > q, p - q, q - p).view("u8").astype("f8") * 2.0 ** (format.mantissa - 52)


def _ordinals(values: Values, format: _Format) -> Values:
    """Return how many numbers of the format lie between zero and each value, signed, in units of 2 ** (mantissa - 52)."""
    bits = values.view("i8")
    magnitude = bits & _MAGNITUDE
    if format.mantissa == 52:
        ordinal = magnitude
    else:
        least_normal = (format.least_exponent + 1023) << 52
        # Rounded to a whole number by the addition of 2 ** 52, as the kernel does it.
        below = np.abs(values) * 2.0 ** (52 - format.least_exponent) + 2.0**52
        whole = below.view("i8") - np.float64(2.0**52).view("i8")
        ordinal = np.where(magnitude >= least_normal, magnitude - least_normal + _ONE, whole)
    return np.where(bits < 0, -ordinal, ordinal)


def _sums(pair: _Pair, scale: float) -> list[float]:
    """Return the squares of baseline, candidate and difference, d (a + b), |d| and d, all of values times `scale`."""
    totals = [np.zeros(LANES) for _ in range(6)]
    for _, a, b, d in _chunks(pair, scale):
        finite = np.isfinite(a) & np.isfinite(b)
        a, b, d = (whole_blocks(np.where(finite, values, 0.0)) for values in (a, b, d))
        products = (a * a, b * b, d * d, d * (a + b), np.abs(d), d)
        totals = [add_blocks(total, product) for total, product in zip(totals, products, strict=True)]
    return [float(fold(total)) for total in totals]


def _rescue_scale(pair: _Pair, sums: list[float]) -> float:
    """Return the factor with which no square overflows, and none that matters underflows."""
    if all(one is None or one.mantissa != 52 for one in (pair.baseline.format, pair.candidate.format)):
        return 1.0
    if not np.isfinite(sums[0] + sums[1] + sums[2] + abs(sums[3])):
        return HUGE_SCALE
    return TINY_SCALE if max(sums[:2]) < TINY_PAIR else 1.0

"""Figures of a pair of tensors by slow, exact means (fractions, mpmath) that share no code with the package."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from fractions import Fraction
from types import ModuleType
from typing import Any

import mpmath
import numpy as np
from hypothesis import strategies as st

from tensorprobe.model import DType
from tensorprobe.numerics.pairs import RAW
from tests.builders.dtypes import KNOWN_DTYPES

from .oracle import EDGE_COUNTS, make_bytes, placed, values_of

FORMATS = {
    "float32": (23, -126),
    "float64": (52, -1022),
    "bfloat16": (7, -126),
    "float16": (10, -14),
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "float8_e4m3fnuz": (3, -7),
    "float8_e5m2fnuz": (2, -15),
    "float8_e8m0fnu": (0, -127),
}
FORMATS |= {"complex32": FORMATS["float16"], "complex64": FORMATS["float32"], "complex128": FORMATS["float64"]}
"""Bits of the mantissa, least exponent of a normal number."""
TOLERANCES = {"within_1e4": 1e-4, "within_1e3": 1e-3, "within_5e3": 5e-3, "within_1e2": 1e-2}
_INTEGERS = {"int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q"}
_INTEGERS |= {"uint64": "Q"}

Number = int | float


def measure(
    module: ModuleType, sides: Sequence[tuple[bytes, DType]], *, offsets: Sequence[int] = (0, 0)
) -> np.ndarray[Any, Any]:
    """The raw figures of (baseline, candidate) by one of the implementations."""
    (baseline, left), (candidate, right) = sides
    out = np.zeros(1, RAW)
    with placed(baseline, offsets[0]) as a, placed(candidate, offsets[1]) as b:
        row = np.array([[a, b, len(baseline) // left.itemsize, left.code, right.code]], np.int64)
        module.measure_pairs(row.ctypes.data, 1, out.ctypes.data)
    return out


def numbers_of(content: bytes, dtype: DType) -> list[Number]:
    """Every real number in the bytes; integers exact."""
    if dtype.name in _INTEGERS:
        return list(struct.unpack(f"<{len(content) // dtype.itemsize}{_INTEGERS[dtype.name]}", content))
    return values_of(content, dtype)


def side_by_side(sides: Sequence[tuple[bytes, DType]]) -> list[tuple[Number, Number]]:
    """The pairs of numbers: a real side gets imaginary parts where the other is complex."""
    lists = [numbers_of(content, dtype) for content, dtype in sides]
    complex_sides = [dtype.kind == "complex" for _, dtype in sides]
    for place, is_complex in enumerate(complex_sides):
        if any(complex_sides) and not is_complex:
            lists[place] = [part for value in lists[place] for part in (value, 0.0)]
    return list(zip(*lists, strict=True))


def ordinal(value: Number, mantissa: int, least_exponent: int) -> Fraction:
    """How many numbers of the format lie between zero and the value, in a straight line in between."""
    size = abs(Fraction(value))
    if size == 0:
        return Fraction(0)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    steps = 2**mantissa
    if exponent < least_exponent:
        count = size / Fraction(2) ** least_exponent * steps
    else:
        count = (exponent - least_exponent + size / Fraction(2) ** exponent) * steps
    return count if value > 0 else -count


def stored_distance(left: bytes, right: bytes, dtype: DType) -> int:
    """Between two stored floats of one dtype, by their bits alone."""
    bits = 8 * len(left)
    if dtype.name == "float8_e8m0fnu":
        return abs(left[0] - right[0])
    orders = []
    for content in (left, right):
        number = int.from_bytes(content, "little")
        magnitude = number & ((1 << (bits - 1)) - 1)
        orders.append(-magnitude if number >> (bits - 1) else magnitude)
    return abs(orders[0] - orders[1])


def distance(a: Number, b: Number, names: tuple[str, str]) -> Fraction:
    """In units of the last place of the coarser dtype; of integers, their difference."""
    formats = [FORMATS[name] for name in names if name in FORMATS]
    if not formats:
        return abs(Fraction(b) - Fraction(a))
    mantissa, least_exponent = min(formats, key=lambda one: (one[0], -one[1]))
    return abs(ordinal(a, mantissa, least_exponent) - ordinal(b, mantissa, least_exponent))


def assert_close(found: float, wanted: Any, *, rel: float, slack: float = 0.0) -> None:
    """Within `rel` of the wanted size, or `slack`; a number beyond float64 must come out as infinite or the greatest."""
    exact = _exact(wanted)
    if abs(exact) > 1.79e308:
        assert abs(found) >= 1.79e308
        return
    with mpmath.workdps(60):
        assert abs(mpmath.mpf(float(found)) - exact) <= rel * abs(exact) + slack, (found, exact)


def _exact(number: Any) -> Any:
    with mpmath.workdps(60):
        return mpmath.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else mpmath.mpf(number)


def derived(pairs: Sequence[tuple[Number, Number]]) -> dict[str, Any]:
    """Figures that a report shows, with 60 digits, of pairs of finite numbers of which neither side is all zero."""
    with mpmath.workdps(60):
        a, b = [mpmath.mpf(x) for x, _ in pairs], [mpmath.mpf(y) for _, y in pairs]
        d = [y - x for x, y in zip(a, b, strict=True)]
        n = len(d)
        norm_a, norm_b, norm_d = (mpmath.sqrt(mpmath.fsum(x * x for x in values)) for values in (a, b, d))
        mean = mpmath.fsum(d) / n
        spread = mpmath.fsum((x - mean) ** 2 for x in d)
        lean = mpmath.fdot(a, d) / norm_a**2
        rest = mpmath.fsum((y - lean * x) ** 2 for x, y in zip(a, d, strict=True))
        return {
            "mean_abs": mpmath.fsum(abs(x) for x in d) / n,
            "relative_l2": norm_d / norm_a,
            "one_minus_cosine": 1 - mpmath.fdot(a, b) / (norm_a * norm_b),
            "norm_ratio": norm_b / norm_a,
            "bias": mean,
            "bias_z": mean / mpmath.sqrt(spread / (n - 1) / n) if n > 1 and spread else mpmath.inf,
            "slope": 1 + lean,
            "slope_z": lean / mpmath.sqrt(rest / (n - 1) / norm_a**2) if n > 1 and rest else mpmath.inf,
        }


def make_pair(left: DType, right: DType, count: int, flavour: str, seed: int) -> tuple[bytes, bytes]:
    """Two tensors; with one dtype and an even seed, the second is the first with a few bytes changed."""
    baseline = make_bytes(left, count, flavour, seed)
    if left is not right or seed % 2:
        return baseline, make_bytes(right, count, flavour, seed + 1)
    source = random.Random(seed)
    candidate = bytearray(baseline)
    for _ in range(source.randrange(12) if candidate else 0):
        candidate[source.randrange(len(candidate))] = source.getrandbits(1 if left.kind == "bool" else 8)
    return baseline, bytes(candidate)


def is_finite(pair: tuple[Number, Number]) -> bool:
    """Whether both sides are; a whole number always is."""
    return all(isinstance(value, int) or math.isfinite(value) for value in pair)


_dtypes = st.sampled_from(list(KNOWN_DTYPES.values()))
dtype_pairs = st.one_of(_dtypes.map(lambda dtype: (dtype, dtype)), st.tuples(_dtypes, _dtypes))
_offsets = st.sampled_from([0, 0, 1, 2, 3, 4])
cases = st.tuples(
    dtype_pairs,
    st.one_of(st.sampled_from([*EDGE_COUNTS, 511, 512, 513, 1024]), st.integers(0, 400)),
    st.sampled_from(["noise", "special", "tame"]),
    st.integers(0, 2**32),
    st.tuples(_offsets, _offsets),
)
"""Both dtypes, number of elements, flavour, seed, offsets of the addresses."""

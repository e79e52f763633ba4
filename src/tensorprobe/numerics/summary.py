"""Statistics, peak and digest of a tensor, from the raw bytes in memory.

- `Moments`: minimum and maximum ignore NaN; mean and norm are those of the finite elements, in float64. A complex tensor
  counts as its real and imaginary parts together. A figure of no values (no element, only NaN, no finite element) is NaN.
- Peak: the greatest magnitude, as the bits of the value without its sign, from one pass of integer maxima. Peaks of one dtype
  are ordered as the magnitudes are, with infinity above every number and NaN above infinity. Three float8 dtypes encode NaN
  elsewhere and have no peak.
- Digest: xxh3-128 of the stored bytes, as 32 hexadecimal digits. It recognises equal content; it does not resist forgery.

Nothing here imports torch; numpy is imported only if the native kernel is missing.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

import xxhash

from tensorprobe.model.dtypes import DType
from tensorprobe.numerics import float8
from tensorprobe.numerics.native import implementation, pinned

_FIGURES = Struct("4d2q")
"""What the kernel writes for each tensor of a batch: four floats, two counts."""


class Moments(NamedTuple):
    """The six figures of a `tensorprobe.model.Summary`, as plain numbers in the same order."""

    max: float
    min: float
    mean: float
    norm: float
    nan: int
    inf: int


Row = tuple[int, int, int]
"""Address, number of elements, dtype code."""


def summarize_address(address: int, count: int, dtype: DType) -> Moments:
    """Return the moments of `count` elements at `address`, aligned or not; raise ValueError when it is null."""
    return Moments._make(implementation().summarize(address, count, dtype.code))


def summarize_buffer(buffer: Any, dtype: DType) -> Moments:
    """Return the moments of a bytes-like object; raise ValueError when its last element is incomplete."""
    with pinned(buffer) as (address, nbytes):
        count, rest = divmod(nbytes, dtype.itemsize)
        if rest:
            raise ValueError(
                f"{nbytes} bytes are not a whole number of {dtype.name} elements ({dtype.itemsize} bytes each)"
            )
        return summarize_address(address, count, dtype)


def summarize_batch(rows: Sequence[Row]) -> list[Moments]:
    """Return the moments of many tensors, in the order of `rows`, from one call of the kernel."""
    if not rows:
        return []
    table = array("q", list(chain.from_iterable(rows)))
    if len(table) != 3 * len(rows):
        raise ValueError("a row of a batch is (address, count, dtype code)")
    out = bytearray(_FIGURES.size * len(rows))
    with pinned(out) as (out_address, _):
        implementation().summarize_many(table.buffer_info()[0], len(rows), out_address)
    return list(map(Moments._make, _FIGURES.iter_unpack(out)))


def join_moments(parts: Sequence[tuple[Moments, int]]) -> Moments:
    """Return the moments of a tensor from the moments and the number of values of each of its pieces.

    For a complex dtype the number of values is twice the number of elements.
    """
    finite = [(moments, count - moments.nan - moments.inf) for moments, count in parts]
    total = sum(count for _, count in finite)
    highs = [moments.max for moments, _ in parts if not math.isnan(moments.max)]
    lows = [moments.min for moments, _ in parts if not math.isnan(moments.min)]
    return Moments(
        max(highs, default=math.nan),
        min(lows, default=math.nan),
        math.fsum(moments.mean * (count / total) for moments, count in finite if count) if total else math.nan,
        math.hypot(*(moments.norm for moments, count in finite if count)) if total else math.nan,
        sum(moments.nan for moments, _ in parts),
        sum(moments.inf for moments, _ in parts),
    )


def json_number(number: float) -> float | str:
    """Return the number, or a string if JSON cannot write it: NaN, Infinity, -Infinity."""
    if number - number == 0:
        return number
    if number != number:
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def json_summary(moments: Moments) -> list[float | str]:
    """Return the value of the key `summary` of a slot in `calls.jsonl`."""
    high, low, mean, norm, nan, inf = moments
    return [json_number(high), json_number(low), json_number(mean), json_number(norm), nan, inf]


class Limits(NamedTuple):
    """Peaks of a dtype: of the greatest finite number, of infinity, and of the first NaN."""

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
"""The limits of each dtype that has peaks."""


def peak_at(address: int, count: int, dtype: DType) -> int:
    """Return the peak of `count` elements at `address`; 0 when there are none."""
    return int(implementation().peak(address, count, dtype.code))


def magnitude(peak: int, dtype: str) -> float:
    """Return the number that a peak of this dtype stands for."""
    dtype = _HALVES.get(dtype, dtype)
    if dtype == "bfloat16":
        return float(struct.unpack("<f", struct.pack("<I", peak << 16))[0])
    if dtype in float8.NAMES:
        return float(float8.decode_table(dtype)[peak])
    code, word = {"float64": ("<d", "<Q"), "float32": ("<f", "<I"), "float16": ("<e", "<H")}[dtype]
    return float(struct.unpack(code, struct.pack(word, peak))[0])


def peak_of_number(value: float, dtype: str) -> int:
    """Return the least peak of the dtype whose magnitude is at least that of `value`."""
    limits = LIMITS[dtype]
    if math.isnan(value):
        return limits.nan
    return limits.infinite if math.isinf(value) else first_peak_over(abs(value), dtype)


@cache
def greatest_finite(dtype: str) -> float:
    """Return the greatest number of a dtype: 65504 for float16; NaN for a dtype that has no peaks."""
    return magnitude(LIMITS[dtype].greatest, dtype) if dtype in LIMITS else math.nan


def first_peak_over(value: float, dtype: str) -> int:
    """Return the least peak whose magnitude is at least `value`."""
    low, high = 0, LIMITS[dtype].infinite
    while low < high:
        middle = (low + high) // 2
        if magnitude(middle, dtype) >= value:
            high = middle
        else:
            low = middle + 1
    return low


def digest(buffer: Any) -> str:
    """Return the digest of a contiguous bytes-like object."""
    return xxhash.xxh3_128_hexdigest(buffer)


class RunningDigest:
    """The digest of bytes that come in pieces; it equals `digest` of all of them together."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: Any) -> None:
        """Add the next piece."""
        self._state.update(piece)

    def hexdigest(self) -> str:
        """Return the digest of the pieces so far."""
        return self._state.hexdigest()

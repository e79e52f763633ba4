"""Statistics of one tensor, or of many, from the raw bytes in memory.

An address, a number of elements and a dtype come in; `Moments` come out, in the order the record has them.
Minimum and maximum pass over NaN; mean and norm are of the finite elements, in float64; a complex tensor counts as its
real and imaginary parts together. A figure of nothing (no element, only NaN, no finite element) is NaN.
Nothing here imports torch; numpy comes in only when the native kernel is absent.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

from tensorprobe.model import DType
from tensorprobe.numerics.address import pinned
from tensorprobe.numerics.native import implementation

_FIGURES = Struct("4d2q")
"""A row of what the kernel writes for a batch: four floats, two counts."""


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
    """The moments of `count` elements at `address`, which need not be aligned; ValueError when it is null."""
    return Moments._make(implementation().summarize(address, count, dtype.code))


def summarize_buffer(buffer: Any, dtype: DType) -> Moments:
    """The moments of all the elements in a bytes-like object; ValueError when the last one is incomplete."""
    with pinned(buffer) as (address, nbytes):
        count, rest = divmod(nbytes, dtype.itemsize)
        if rest:
            raise ValueError(
                f"{nbytes} bytes are no whole number of {dtype.name} elements ({dtype.itemsize} bytes each)"
            )
        return summarize_address(address, count, dtype)


def summarize_batch(rows: Sequence[Row]) -> list[Moments]:
    """The moments of many tensors, in one call of the kernel; in the order of `rows`."""
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
    """The moments of a tensor that came in pieces, from the moments and the number of values of each piece.

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
    """The number itself, or its name when JSON has no way to write it: NaN, Infinity, -Infinity."""
    if number - number == 0:
        return number
    if number != number:
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def json_summary(moments: Moments) -> list[float | str]:
    """The value of the key `summary` of a slot in `calls.jsonl`."""
    high, low, mean, norm, nan, inf = moments
    return [json_number(high), json_number(low), json_number(mean), json_number(norm), nan, inf]

"""A sketch of a tensor: eight numbers, from two of which the distance between two tensors can be estimated.

Each element is added to one of eight buckets, with a sign; both are drawn from its position (a count sketch). The squared
distance between two sketches is on average that of the tensors. The sums run in order and in float64, so that every machine gets
the same bytes. NaN and infinity count as zero: the statistics count them.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy

Array = numpy.ndarray[Any, Any]

_BUCKETS = 8
_PIECE = 1 << 18
_ROUNDING = 4e-7
"""Sketches are kept in float32: a distance below this share of their size is rounding."""


def sketch_of(values: Array) -> str | None:
    """Return the sketch as text; None for values that are too large, or too few to be worth it."""
    flat = numpy.ascontiguousarray(values).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    if flat.size <= 2:
        return None
    sums = numpy.zeros(_BUCKETS)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE].astype(numpy.float64)
        drawn = _draw(start, piece.size)
        signed = numpy.where(drawn & _BUCKETS, piece, -piece)
        signed[~numpy.isfinite(piece)] = 0.0
        sums += numpy.bincount(drawn & (_BUCKETS - 1), weights=signed, minlength=_BUCKETS)
    with numpy.errstate(over="ignore"):
        kept = sums.astype("<f4")
    return base64.b64encode(kept.tobytes()).decode() if numpy.isfinite(kept).all() else None


def estimate_distance(one: str, other: str) -> float:
    """Return about the norm of the difference of two tensors; NaN when it is below the precision of their sketches."""
    pair = (_decode(one), _decode(other))
    size = max(float(numpy.linalg.norm(each)) for each in pair)
    apart = float(numpy.linalg.norm(pair[1] - pair[0]))
    return apart if apart > _ROUNDING * size else float("nan")


def _decode(text: str) -> Array:
    """Return the numbers of a sketch from a file; NaN for one that is none."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    whole = len(raw) == 4 * _BUCKETS
    return numpy.frombuffer(raw, "<f4").astype(numpy.float64) if whole else numpy.full(_BUCKETS, numpy.nan)


def _draw(start: int, count: int) -> Array:
    """Return four well mixed bits for each position (the last step of SplitMix64)."""
    mixed = numpy.arange(start + 1, start + count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return (mixed >> numpy.uint64(60)).astype(numpy.int64)

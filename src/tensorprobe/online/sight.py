"""What can be said of a result at first sight, from the raw figures of one pass: that it is right, or that one must look again.

The limits here are those that the noise-aware standard of precheck has where the CPU itself makes no error at all. What is
within them is within all of its limits; what is not is weighed there, with more evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from tensorprobe.judge.families import Family, family_of
from tensorprobe.model import DTYPES
from tensorprobe.numerics.pairs import RAW, measure_pairs
from tensorprobe.precheck import standards
from tensorprobe.precheck.measuring import beyond_rounding
from tensorprobe.precheck.standards import rounds_once

_CODES = {getattr(torch, name): dtype.code for name, dtype in DTYPES.items() if hasattr(torch, name)}
_AT = {name: at for at, name in enumerate(RAW.names or ())}
_SUMS = [_AT[name] for name in ("squares_a", "squares_d", "d_times_sum", "sum_d", "max_abs", "finite")]
_SCALE, _DIFFERENT, _BROKEN = _AT["scale"], _AT["different"], _AT["nonfinite_different"]
_ROUGH = {True: _AT["within_1e2"], False: _AT["within_1e3"]}

Raw = tuple[Any, ...]
"""One row of `numerics.pairs.RAW`."""


def look(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Raw]:
    """The raw figures of pairs (reference, result), both on the host, contiguous and of one shape."""
    rows = [
        (one.data_ptr(), other.data_ptr(), one.numel(), _CODES[one.dtype], _CODES[other.dtype]) for one, other in pairs
    ]
    return measure_pairs(numpy.array(rows, dtype=numpy.int64)).tolist()  # type: ignore[no-any-return]


def is_equal(raw: Raw) -> bool:
    """Whether no value differs."""
    return raw[_DIFFERENT] == 0 and raw[_BROKEN] == 0  # type: ignore[no-any-return]


def relative_error(raw: Raw) -> float:
    """The norm of the difference over that of the reference."""
    squares_a, squares_d = raw[_SUMS[0]], raw[_SUMS[1]]
    return math.sqrt(squares_d / squares_a) if squares_a else math.inf if squares_d else 0.0


def is_right(op: str, direction: str, raw: Raw, wide: torch.Tensor, result: torch.Tensor, *, alone: bool) -> bool:
    """Whether a result is right beyond doubt. `alone` says that the CPU itself is what is under test."""
    if is_equal(raw):
        return True
    dtype = result.dtype
    if raw[_BROKEN] or raw[_SCALE] != 1.0 or not (dtype.is_floating_point or dtype.is_complex):
        return False
    if direction == "forward" and family_of(op) & Family.EXACT:
        return False
    squares_a, squares_d, d_times_sum, sum_d, max_abs, count = (raw[at] for at in _SUMS)
    if not squares_a or count < 1:
        return False
    limits = _ALONE if alone else _BESIDE
    eps = torch.finfo(dtype).eps
    half = dtype in standards.HALF
    once = not alone and rounds_once(op, dtype)
    norm = standards.ONCE_FLOOR if once and count >= standards.MANY else limits["norm"]
    scale = math.sqrt(squares_a / count)
    if math.sqrt(squares_d / squares_a) > norm * eps:
        return False
    if max_abs > limits["most"] * eps * scale and max_abs > limits["most"] * eps * _largest(wide):
        return False
    if not alone and count - raw[_ROUGH[half]] > standards.FLOOR_COUNT:
        return False
    a_times_d = (d_times_sum - squares_d) / 2
    trend = limits["trend"] * eps
    if abs(a_times_d) / squares_a > trend and _is_sure(a_times_d / math.sqrt(squares_a), squares_d, count):
        return False
    if abs(sum_d) / count > trend * scale and _is_sure(sum_d / math.sqrt(count), squares_d, count):
        return False
    if once:
        beyond = standards.ONCE_SHARE * eps * _largest(wide)
        return bool(max_abs <= beyond or beyond_rounding(wide, result) <= beyond)
    return True


_BESIDE: Mapping[str, float] = {
    "norm": standards.FLOOR_NORM,
    "most": standards.FLOOR_MAX,
    "trend": standards.FLOOR_TREND,
}
_ALONE: Mapping[str, float] = {
    "norm": standards.ALONE_NORM,
    "most": standards.ALONE_MAX,
    "trend": standards.ALONE_TREND,
}


def _is_sure(part: float, squares_d: float, count: int) -> bool:
    """Whether a trend is more standard errors away from none than chance explains."""
    rest = squares_d - part * part
    return count >= 2 and (rest <= 0 or part * part > standards.SURE**2 * rest / max(count - 1, 1))


def _largest(wide: torch.Tensor) -> float:
    """The greatest value; 0, which makes one look again, where not all are finite."""
    largest = float(torch.linalg.vector_norm(wide, math.inf)) if wide.numel() else 0.0
    return largest if math.isfinite(largest) else 0.0

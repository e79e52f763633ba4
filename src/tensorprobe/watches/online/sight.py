"""What can be said of a result at first sight, from one pass over the numbers: that it is right, or that one must look again.

The limits here are those that the noise-aware standard of precheck has where the CPU itself makes no error at all. What is
within them is within all of its limits; what is not is weighed there, with more evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch

from tensorprobe.judge.families import Family, family_of
from tensorprobe.model import DTYPES
from tensorprobe.numerics.native import implementation
from tensorprobe.numerics.pairs import derive, measure_pairs
from tensorprobe.replay import standards
from tensorprobe.replay.evidence import count_terms
from tensorprobe.replay.measuring import beyond_rounding
from tensorprobe.replay.standards import rounds_once

_CODES = {getattr(torch, name): dtype.code for name, dtype in DTYPES.items() if hasattr(torch, name)}
_EPS = {dtype: torch.finfo(dtype).eps for dtype in _CODES if dtype.is_floating_point or dtype.is_complex}
_COMPLEX = frozenset(dtype for dtype in _CODES if dtype.is_complex)
_glance = implementation().glance


class _Limits(NamedTuple):
    """In units of the dtype's rounding: of the norm, of the greatest error, of a trend."""

    norm: float
    most: float
    trend: float


_BESIDE = _Limits(standards.FLOOR_NORM, standards.FLOOR_MAX, standards.FLOOR_TREND)
_ALONE = _Limits(standards.ALONE_NORM, standards.ALONE_MAX, standards.ALONE_TREND)


class Sight(NamedTuple):
    """Sums over all values, all of them finite: a of the reference, d of the result minus it."""

    squares_a: float
    squares_d: float
    a_times_d: float
    sum_d: float
    max_d: float
    max_a: float
    different: float
    astray_1e3: float
    astray_1e2: float

    @property
    def relative_error(self) -> float:
        """The norm of the difference over that of the reference."""
        return math.sqrt(self.squares_d / self.squares_a) if self.squares_a else math.inf if self.squares_d else 0.0


_EQUAL = Sight(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def glance(wide: torch.Tensor, result: torch.Tensor) -> Sight | None:
    """The sums of a pair on the host, contiguous and of one shape; None where some value is not finite and they differ."""
    codes = _CODES[wide.dtype], _CODES[result.dtype]
    where = wide.data_ptr(), result.data_ptr(), wide.numel()
    found = _glance(*where, *codes)
    if found is not None:
        return Sight(*found)
    raw = measure_pairs(numpy.array([(*where, *codes)], dtype=numpy.int64))
    return _EQUAL if not raw["different"][0] and not raw["nonfinite_different"][0] else None


def relative_error(wide: torch.Tensor, result: torch.Tensor) -> float:
    """The norm of the difference over that of the reference, of the finite values."""
    seen = glance(wide, result)
    if seen is not None:
        return seen.relative_error
    row = (wide.data_ptr(), result.data_ptr(), wide.numel(), _CODES[wide.dtype], _CODES[result.dtype])
    return float(derive(measure_pairs(numpy.array([row], dtype=numpy.int64)))["relative_l2"][0])


def is_right(
    op: str, seen: Sight, wide: torch.Tensor, result: torch.Tensor, *, alone: bool, sizes: Sequence[int] = ()
) -> bool:
    """Whether a result is right beyond doubt. `alone` says that the CPU itself is under test; `sizes` are those of the inputs."""
    if not seen.different:
        return True
    dtype = result.dtype
    eps = _EPS.get(dtype)
    if eps is None or not seen.squares_a or family_of(op) & Family.EXACT:
        return False
    count = result.numel() * (2 if dtype in _COMPLEX else 1)
    limits = _ALONE if alone else _BESIDE
    once = not alone and rounds_once(op, dtype)
    norm = standards.ONCE_FLOOR if once and count >= standards.MANY else limits.norm
    if alone:
        norm *= max(1.0, math.sqrt(count_terms(op, sizes, count)) / standards.ALONE_TERMS)
    if seen.relative_error > norm * eps or seen.max_d > limits.most * eps * seen.max_a:
        return False
    if not alone:
        astray = seen.astray_1e2 if dtype in standards.HALF else seen.astray_1e3
        if astray > standards.FLOOR_COUNT:
            return False
    if _leans(seen, limits.trend * eps, count):
        return False
    if once:
        beyond = standards.ONCE_SHARE * eps * seen.max_a
        return bool(seen.max_d <= beyond or beyond_rounding(wide, result) <= beyond)
    return True


def _leans(seen: Sight, trend: float, count: int) -> bool:
    """Whether the difference grows with the reference, or lies to one side, by more than `trend` and surely."""
    squares_a, squares_d = seen.squares_a, seen.squares_d
    if abs(seen.a_times_d) > trend * squares_a and _is_sure(seen.a_times_d / math.sqrt(squares_a), squares_d, count):
        return True
    if abs(seen.sum_d) <= trend * math.sqrt(squares_a / count) * count:
        return False
    return _is_sure(seen.sum_d / math.sqrt(count), squares_d, count)


def _is_sure(part: float, squares_d: float, count: int) -> bool:
    """Whether a trend is more standard errors away from none than chance explains."""
    rest = squares_d - part * part
    return count >= 2 and (rest <= 0 or part * part > standards.SURE**2 * rest / max(count - 1, 1))

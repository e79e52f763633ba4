"""One pass over a pair of tensors, which settles most results: they are right beyond doubt.

The limits are those that the noise-aware standard has where the CPU makes no error at all (`judge.standards.is_right`). What exceeds
them is judged by that standard, with more evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy
import torch

from tensorprobe.judge import standards
from tensorprobe.judge.standards import Sight
from tensorprobe.model import DTYPES
from tensorprobe.numerics.native import implementation
from tensorprobe.numerics.pairs import derive, measure_pairs
from tensorprobe.replay.evidence import beyond_rounding, count_terms

_CODES = {getattr(torch, name): dtype.code for name, dtype in DTYPES.items() if hasattr(torch, name)}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _CODES}
_COMPLEX = frozenset(dtype for dtype in _CODES if dtype.is_complex)
_glance = implementation().glance


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
    dtype = result.dtype
    count = result.numel() * (2 if dtype in _COMPLEX else 1)
    return standards.is_right(
        op,
        _NAMES[dtype],
        seen,
        count,
        terms=partial(count_terms, op, sizes, count) if alone else None,
        beyond=partial(beyond_rounding, wide, result),
    )

"""The first look at a result beside its float64 reference: one pass in C, which settles most results.

A result is clearly right if it passes the `noise-aware` standard even with a CPU that makes no error at all. For the others the
call has to run in its own dtype, too. In: two contiguous tensors of equal shape on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy
import torch

from tensorprobe.judge import standards
from tensorprobe.judge.standards import Sight, norm_at_sight
from tensorprobe.model import DTYPES
from tensorprobe.model.measured import Opinion
from tensorprobe.numerics.masks import LEAST_MASK
from tensorprobe.numerics.native import implementation
from tensorprobe.numerics.pairs import derive, measure_pairs
from tensorprobe.replay.evidence import beyond_rounding, count_terms, on_host, shared_mask

_CODES = {getattr(torch, name): dtype.code for name, dtype in DTYPES.items() if hasattr(torch, name)}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _CODES}
_COMPLEX = frozenset(dtype for dtype in _CODES if dtype.is_complex)
_EQUAL = Sight(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_glance = implementation().glance


def glance(wide: torch.Tensor, result: torch.Tensor) -> Sight | None:
    """Return the sums of a pair; None if they differ and some value is not finite."""
    codes = _CODES[wide.dtype], _CODES[result.dtype]
    where = wide.data_ptr(), result.data_ptr(), wide.numel()
    found = _glance(*where, *codes)
    if found is not None:
        return Sight(*found)
    raw = measure_pairs(numpy.array([(*where, *codes)], dtype=numpy.int64))
    return _EQUAL if not raw["different"][0] and not raw["nonfinite_different"][0] else None


def relative_error(wide: torch.Tensor, result: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference, of the finite values."""
    seen = glance(wide, result)
    if seen is not None:
        return seen.relative_error
    row = (wide.data_ptr(), result.data_ptr(), wide.numel(), _CODES[wide.dtype], _CODES[result.dtype])
    return float(derive(measure_pairs(numpy.array([row], dtype=numpy.int64)))["relative_l2"][0])


def is_right(
    op: str, seen: Sight, wide: torch.Tensor, result: torch.Tensor, *, alone: bool, sizes: Sequence[int] = ()
) -> bool:
    """Return whether a result is clearly right. `alone`: the CPU itself is under test. `sizes` are those of the inputs.

    A mask may hide errors of the other elements: nothing is clear then.
    """
    if seen.different and seen.max_a >= LEAST_MASK and shared_mask(wide, result) is not None:
        return False
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


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same values, NaN included. The first may be anywhere in memory."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    seen = glance(on_host(one), other)
    return seen is not None and not seen.different


def opinion_at_sight(op: str, wide: torch.Tensor, result: torch.Tensor) -> Opinion | None:
    """Return the opinion on a clearly right result, else None."""
    seen = glance(wide, result)
    if seen is None or not is_right(op, seen, wide, result, alone=False):
        return None
    if not seen.different:
        return Opinion("different", 0.0, 0.0)
    count = result.numel() * (2 if result.dtype in _COMPLEX else 1)
    return Opinion("relative_l2", seen.relative_error, norm_at_sight(op, _NAMES[result.dtype], count))

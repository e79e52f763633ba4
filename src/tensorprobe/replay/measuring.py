"""Results of a replay against those of the reference, in figures: the pair kernel on tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import torch

from tensorprobe.model import DTYPES
from tensorprobe.numerics.pairs import derive, measure_pairs

Figures = Mapping[str, float]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values on the CPU, in one row-major block."""
    if tensor._is_zerotensor():  # stands for zeros without having memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def measure(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Figures]:
    """The figures of each pair (reference, result), both on the host and of one shape."""
    if not pairs:
        return []
    rows = [
        (one.data_ptr(), other.data_ptr(), one.numel(), _code(one.dtype), _code(other.dtype)) for one, other in pairs
    ]
    raw = measure_pairs(numpy.array(rows, dtype=numpy.int64))
    figures = derive(raw)
    return [{name: column[at].item() for name, column in figures.items()} for at in range(len(pairs))]


def within_range(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The reference as far as `dtype` can follow: what is too large for it is infinite, what is too small is rounded."""
    if not (wide.dtype.is_floating_point and dtype.is_floating_point) or dtype is wide.dtype or dtype.itemsize < 2:
        return wide
    edges = torch.finfo(dtype)
    if wide.numel():
        low, high = wide.abs().aminmax()
        if low >= edges.tiny and high <= edges.max:  # false also where something is not a number
            return wide
    rounded = wide.to(dtype)
    beyond = (rounded.isinf() | (wide.abs() < edges.tiny)) & (rounded.to(wide.dtype) != wide)
    return torch.where(beyond, rounded.to(wide.dtype), wide) if beyond.any() else wide


def beyond_rounding(wide: torch.Tensor, result: torch.Tensor) -> float:
    """The greatest error of an element beyond what rounding that very element to its dtype makes."""
    error = (result.to(wide.dtype) - wide).abs() - torch.finfo(result.dtype).eps * wide.abs()
    error = error[error.isfinite()]
    return max(0.0, float(error.max())) if error.numel() else 0.0


def finite_part(tensor: torch.Tensor) -> torch.Tensor:
    """The finite values as float64, complex ones as their parts."""
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    return wide[wide.isfinite()]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that the record and the judge have for a dtype."""
    return str(dtype).removeprefix("torch.")


def _code(dtype: torch.dtype) -> int:
    return DTYPES[dtype_name(dtype)].code

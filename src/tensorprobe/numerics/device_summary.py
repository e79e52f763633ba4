"""Statistics of a tensor, computed on its own device without a copy to the host.

In: a dense tensor. Out: a tensor of six figures on the same device, in the order of `Moments`. The host never waits for the
device: many such tensors are fetched later in one transfer. Maximum, minimum and counts equal those of `summary`; mean and
norm agree up to the order of summation. A device without float64 sums in float32: its figures have float32 precision, and
its counts are exact up to 2**24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tensorprobe.model.interrupts import let_through
from tensorprobe.numerics.summary import Moments


class _Range(NamedTuple):
    """For an accumulator's dtype: the magnitudes beyond which values are scaled before squaring, and the factors."""

    huge: float
    huge_scale: float
    tiny: float
    tiny_scale: float


_RANGES = {
    torch.float64: _Range(2.0**480, 2.0**-600, 2.0**-400, 2.0**600),
    torch.float32: _Range(2.0**40, 2.0**-90, 2.0**-40, 2.0**80),
}
_COMPUTABLE_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPUTABLE_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def device_moments(tensor: Tensor) -> Tensor:
    """Return the six figures (max, min, mean, norm, nan, inf) as a 1-D tensor on the device of `tensor`.

    Its dtype is float64, or float32 on a device that has no float64.
    """
    wide = torch.float64 if _has_float64(tensor.device.type) else torch.float32
    with torch.no_grad():
        values = _computable(tensor.detach(), wide)
        if values.numel() == 0:
            return _figures_of_nothing(values.device, wide)
        if values.dtype.is_floating_point:
            return _float_moments(values, wide)
        return _integer_moments(values, wide)


def fetch_moments(figures: Sequence[Tensor]) -> list[Moments]:
    """Return the results of `device_moments` as numbers, in the same order, with one transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, figure in enumerate(figures):
        by_device.setdefault(figure.device, []).append(place)
    fetched: list[Moments] = [Moments(0, 0, 0, 0, 0, 0)] * len(figures)
    for places in by_device.values():
        rows = torch.stack([figures[place] for place in places]).tolist()
        for place, (high, low, mean, norm, nan, inf) in zip(places, rows, strict=True):
            fetched[place] = Moments(high, low, mean, norm, int(nan), int(inf))
    return fetched


@cache
def _has_float64(device_type: str) -> bool:
    """Return whether the device has float64. It is tried out, since no query covers every backend."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device_type).sum()
    except (TypeError, RuntimeError) as error:
        let_through(error)
        return False
    return True


def _computable(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """Return the values in a dtype that every device can reduce, complex ones as real and imaginary parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype in _COMPUTABLE_FLOATS or tensor.dtype in _COMPUTABLE_INTEGERS:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else wide)


def _figures_of_nothing(device: torch.device, wide: torch.dtype) -> Tensor:
    figures = torch.zeros(6, dtype=wide, device=device)
    figures[:4] = math.nan
    return figures


def _float_moments(values: Tensor, wide: torch.dtype) -> Tensor:
    nan = values.isnan().sum()
    inf = values.isinf().sum()
    # If all values are NaN, the replacements would be infinities; `masked_fill` makes them NaN again.
    only_nan = nan == values.numel()
    high = torch.nan_to_num(values, nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax().to(wide)
    low = torch.nan_to_num(values, nan=math.inf, posinf=math.inf, neginf=-math.inf).amin().to(wide)
    clean = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    scale: Tensor | float = 1.0
    if _may_leave_range(values.dtype, wide):
        clean = clean.to(wide)
        scale = _rescue_scale(clean, wide)
        clean = clean * scale
    # Without a finite value, zero divided by zero gives the NaN that mean and norm must be.
    finite = (values.numel() - nan - inf).to(wide)
    mean = clean.sum(dtype=wide) / finite / scale
    norm = torch.linalg.vector_norm(clean, dtype=wide) / scale * (finite / finite)
    return _row(high.masked_fill(only_nan, math.nan), low.masked_fill(only_nan, math.nan), mean, norm, nan, inf, wide)


def _integer_moments(values: Tensor, wide: torch.dtype) -> Tensor:
    low, high = values.aminmax()
    numbers = values.to(wide)
    none = torch.zeros((), dtype=wide, device=values.device)
    return _row(high, low, numbers.mean(), torch.linalg.vector_norm(numbers), none, none, wide)


def _may_leave_range(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether squares can overflow or underflow in the accumulator; those of float16 cannot."""
    return dtype == torch.float64 or (wide == torch.float32 and dtype in (torch.float32, torch.bfloat16))


def _rescue_scale(clean: Tensor, wide: torch.dtype) -> Tensor:
    """Return the power of two by which the values are multiplied before they are squared; 1 for nearly every tensor."""
    limits = _RANGES[wide]
    peak = clean.abs().amax()
    scale = torch.ones_like(peak).masked_fill(peak > limits.huge, limits.huge_scale)
    return scale.masked_fill((peak < limits.tiny) & (peak > 0), limits.tiny_scale)


def _row(high: Tensor, low: Tensor, mean: Tensor, norm: Tensor, nan: Tensor, inf: Tensor, wide: torch.dtype) -> Tensor:
    # Adding zero makes -0.0 a plain zero, as the kernel does.
    return torch.stack([figure.to(wide) for figure in (high, low, mean, norm, nan, inf)]) + 0.0

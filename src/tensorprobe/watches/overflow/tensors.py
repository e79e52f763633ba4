"""Facts of tensors that are in memory, here or on a device. Nothing is kept, changed, or seen by any mode."""

from __future__ import annotations

from collections.abc import Hashable

import numpy
import torch

from tensorprobe import torch_names
from tensorprobe.model.dtypes import DTYPES, DType
from tensorprobe.numerics.device_summary import device_moments, fetch_moments
from tensorprobe.numerics.summary import summarize_address
from tensorprobe.record.snapshot import plain
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.facts import Facts

FLOATING: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype
    for name, dtype in DTYPES.items()
    if dtype.kind in ("float", "complex") and hasattr(torch, name)
}
SHOWN_PLACES = 8


def facts_of(slot: str, tensor: torch.Tensor) -> Facts | None:
    """The facts of a tensor in memory, here or on a device; None for what holds no floating-point numbers in plain memory."""
    found = readable(tensor)
    if found is None:
        return None
    dtype = FLOATING[found.dtype]
    with quiet():
        if found.is_cpu:
            block = one_block(found)
            moments = summarize_address(torch_names.address_of(block) if block.numel() else 0, block.numel(), dtype)
        else:
            (moments,) = fetch_moments([device_moments(found)])
    parameter = tensor.requires_grad and tensor.is_leaf
    return Facts(slot, dtype.name, tuple(found.shape), moments, key_of(found), lambda: found, parameter)


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor of floating-point numbers inside, if there is one whose values can be read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        found = plain(tensor)
        if isinstance(found, str):
            return None
        tensor = found
    if tensor.dtype not in FLOATING or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if tensor.is_cpu and tensor.numel() and torch_names.address_of(tensor) == tensor.storage_offset() * tensor.itemsize:
        return None  # its storage has no memory
    return tensor.detach()


def one_block(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in one block of memory, in whatever order."""
    if tensor.is_contiguous():
        return tensor
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).contiguous()


def key_of(tensor: torch.Tensor) -> Hashable:
    """The same for all tensors that look at one storage."""
    return int(tensor.untyped_storage()._cdata)


def places_of(tensor: torch.Tensor, *, greatest: bool = False) -> tuple[int, list[list[int]]]:
    """How many elements are not finite, or with `greatest` stand at the limit of their dtype; and where the first ones are."""
    with quiet():
        values = torch.view_as_real(tensor).abs().amax(-1) if tensor.is_complex() else tensor.detach()
        wide = values.double() if values.dtype.itemsize == 1 else values
        chosen = wide.abs() >= torch.finfo(values.dtype).max if greatest else ~wide.isfinite()
        flat = chosen.flatten().nonzero().flatten()
        first = flat[:SHOWN_PLACES].tolist()
        return flat.numel(), [[int(at) for at in numpy.unravel_index(place, tuple(tensor.shape))] for place in first]

"""Copies of tensors that keep their strides, with gaps, overlaps and expanded dimensions.

torch's own copies (`clone`, `to`) make such tensors contiguous, so they would take another path through a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def room(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def block(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor spans, as a flat tensor."""
    return tensor.detach().as_strided((room(tensor.shape, tensor.stride()),), (1,))


def distinct(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view without shared elements, expanded dimensions reduced to 1; None if windows overlap."""
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
    shape = [1 if not step else size for size, step in pairs]
    view = tensor.as_strided(shape, tensor.stride())
    return view if room(shape, tensor.stride()) >= view.numel() else None


def laid_out(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return the values in new memory with these strides. If elements share memory, the last one counts."""
    flat = torch.zeros(room(values.shape, stride), dtype=values.dtype)
    place = torch.zeros((), dtype=torch.int64)
    for size, step in zip(values.shape, stride, strict=True):
        place = place.unsqueeze(-1) + torch.arange(size) * step
    flat[place.flatten()] = values.flatten()
    return flat.as_strided(values.shape, stride)


def copied(tensor: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a copy in that dtype on that device, with the same strides."""
    if tensor.is_contiguous():
        moved = tensor.to(dtype).to(device)
        return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved
    flat = block(tensor)
    moved = flat.to(dtype).to(device)
    moved = moved.clone() if moved.data_ptr() == flat.data_ptr() else moved
    return moved.as_strided(tensor.shape, tensor.stride())

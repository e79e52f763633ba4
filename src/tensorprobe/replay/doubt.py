"""How far a result moves when its inputs change by one rounding: what of an error is the noise of the arithmetic itself.

Before a result is called wrong, the CPU runs the call a few times more, in its own dtype and in that of the reference, each
time with inputs that differ in their last bit. A sum that cancels, a quotient by almost nothing, a gradient that is
mathematically zero move far; an error that stays the same whatever the last bits are does not. Asked for only where a
verdict would be a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tensorprobe.replay.inputs import generator
from tensorprobe.replay.layout import laid_out
from tensorprobe.replay.measuring import Figures, measure, on_host

TIMES, TIMES_HARD = 3, 10
"""How often the inputs are changed; at the edges results jump, and more often shows how far."""
_HALF = (torch.float16, torch.bfloat16)
_SPARSE = 8
"""Kernels for half precision work in a wider type inside: there only one input in so many is changed."""

Tensors = Mapping[str, torch.Tensor]


def nudged(tensors: Tensors, key: str, *, sparse: bool) -> dict[str, torch.Tensor]:
    """The tensors, floating ones with their last bits changed, up or down by the key."""
    return {name: _nudge(tensor, f"{key}:{name}", sparse) for name, tensor in tensors.items()}


def _nudge(tensor: torch.Tensor, key: str, sparse: bool) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2:
        return tensor
    source = generator(key)
    change = torch.randint(0, 2, tensor.shape, generator=source, dtype=torch.float64) * 2 - 1
    if sparse and tensor.dtype in _HALF:
        change *= torch.randint(0, _SPARSE, tensor.shape, generator=source) == 0
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    rounding = torch.finfo(tensor.dtype)
    # Below the normal numbers the last bit is worth the same everywhere. A zero is often there on purpose, and stays.
    moved = (wide + wide * rounding.eps * change + (wide != 0) * change * rounding.tiny * rounding.eps).to(tensor.dtype)
    kept = torch.where(moved.isfinite(), moved, tensor)
    # Strides count: another layout may take another path through the kernel.
    return kept if tensor.is_contiguous() else laid_out(kept, tensor.stride())


def spread(moves: Iterable[tuple[Tensors, Tensors]], wide: Tensors) -> dict[str, Figures]:
    """For each slot the worst figures of all moves (results before, results after), measured against the reference `wide`."""
    pairs, names = [], []
    for before, after in moves:
        for name, result in after.items():
            if name in before and name in wide and result.shape == before[name].shape == wide[name].shape:
                pairs.append((wide[name], _moved(wide[name], on_host(before[name]), on_host(result))))
                names.append(name)
    found: dict[str, Figures] = {}
    for name, figures in zip(names, measure(pairs), strict=True):
        found[name] = _worse(found[name], figures) if name in found else figures
    return found


def _moved(wide: torch.Tensor, base: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The reference, moved as the result has moved; integers have moved where they differ."""
    if not (wide.is_floating_point() or wide.is_complex()):
        return torch.where(base == result, wide, result.to(wide.dtype)).contiguous()
    one, other = base.to(wide.dtype), result.to(wide.dtype)
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, wide, wide + (other - one)).contiguous()


def _worse(one: Figures, other: Figures) -> Figures:
    """The greater of each figure; of shares and of the slope the one that is further from 1."""
    worst = {}
    for name, value in one.items():
        if name == "slope":
            worst[name] = max(value, other[name], key=lambda slope: abs(slope - 1))
        elif name == "bias":
            worst[name] = max(value, other[name], key=abs)
        else:
            worst[name] = (min if name.startswith("within") else max)(value, other[name])
    return worst

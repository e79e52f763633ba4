"""Matrix products, convolutions and sums whose running total is kept in a narrow type, as some accelerators do.

`accumulate_in(name, args, kwargs, dtype, block)` computes the op `name` on CPU tensors: terms of one block are summed
as usual, each block's sum is added to a total that is rounded to `dtype` after every addition. Ops it does not know
are a `SettingsError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorprobe.errors import SettingsError


def _running_total(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part.to(dtype) if total is None else (total.float() + part.float()).to(dtype)
    if total is None:
        raise SettingsError("an accumulation over zero terms has no total; leave empty tensors to the right kernel")
    return total


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    depth = a.size(-1)
    if depth == 0:
        return a @ b
    parts = (
        a.narrow(-1, start, min(block, depth - start)).float() @ b.narrow(-2, start, min(block, depth - start)).float()
        for start in range(0, depth, block)
    )
    return _running_total(parts, dtype).to(a.dtype)


def _mm(args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype, block: int) -> Tensor:
    return _product(args[0], args[1], dtype, block)


def _addmm(args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype, block: int) -> Tensor:
    product = _product(args[1], args[2], dtype, block)
    return (kwargs.get("beta", 1) * args[0] + kwargs.get("alpha", 1) * product).to(product.dtype)


def _dimensions(args: Sequence[Any], kwargs: dict[str, Any], rank: int) -> tuple[list[int], bool]:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    if isinstance(dims, int):
        dims = [dims]
    return [dim % rank for dim in dims] if dims else list(range(rank)), keepdim


def _sum(args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype, block: int) -> Tensor:
    x: Tensor = args[0]
    if x.dim() == 0 or x.numel() == 0:
        return x.sum()
    dims, keepdim = _dimensions(args, kwargs, x.dim())
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    rows = x.permute(*kept, *dims).reshape(*[x.size(dim) for dim in kept], -1)
    total = _running_total((part.float().sum(-1) for part in rows.split(block, -1)), dtype)
    shape = [1 if dim in dims else x.size(dim) for dim in range(x.dim())]
    return (total.reshape(shape) if keepdim else total).to(kwargs.get("dtype") or x.dtype)


def _mean(args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype, block: int) -> Tensor:
    total = _sum(args, kwargs, dtype, block)
    return total / (args[0].numel() / max(total.numel(), 1))


def _convolution(args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype, block: int) -> Tensor:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    if groups != 1 or transposed:
        raise SettingsError("kind 'accumulate' knows plain convolutions only (groups 1, not transposed)")
    parts = (
        torch.ops.aten.convolution.default(
            x[:, start : start + block], weight[:, start : start + block], None, stride, padding, dilation,
            transposed, output_padding, groups,
        )
        for start in range(0, x.size(1), block)
    )  # fmt: skip
    total = _running_total(parts, dtype).to(x.dtype)
    return total if bias is None else total + bias.view(-1, *[1] * len(stride))


_KNOWN: dict[str, Callable[[Sequence[Any], dict[str, Any], torch.dtype, int], Tensor]] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::sum": _sum,
    "aten::mean": _mean,
    "aten::convolution_overrideable": _convolution,
}


def accumulate_in(name: str, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype, block: int) -> Tensor:
    """The op's result with its running total kept in `dtype`."""
    if name not in _KNOWN:
        raise SettingsError(f"kind 'accumulate' knows {', '.join(sorted(_KNOWN))}; not {name}. Try kind 'compute-in'.")
    return _KNOWN[name](args, kwargs, dtype, block)

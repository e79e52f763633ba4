"""What can be wrong with a result: layers for the kernels of `device`. Values are changed in float64 and rounded to their dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.heldout.device import Kernel, Layer

Change = Callable[[Tensor], Tensor]


def changed(change: Change, output: int = 0) -> Layer:
    """The kernel is right, then one of its outputs is changed. In-place kernels change their first argument."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = kernel(*args, **kwargs)
        parts = [result] if isinstance(result, Tensor) else list(result)
        old = parts[output]
        new = change(old.detach().double().contiguous()).to(old.dtype)
        if any(each is old for each in args):
            old.copy_(new)
        else:
            parts[output] = torch.empty_like(old).copy_(new)  # keeps the strides
        return parts[0] if isinstance(result, Tensor) else tuple(parts)

    return layer


def scaled(factor: float, output: int = 0) -> Layer:
    return changed(lambda x: x * factor, output)


def shifted(share: float, output: int = 0) -> Layer:
    """Every element too large by a share of the root of the mean square."""
    return changed(lambda x: x + share * _rms(x), output)


def one_element(share: float, at: float = 0.5, output: int = 0) -> Layer:
    def change(x: Tensor) -> Tensor:
        x.view(-1)[int(at * (x.numel() - 1))] += share * _rms(x)
        return x

    return changed(change, output)


def one_tile(factor: float, size: int = 4, output: int = 0) -> Layer:
    """A square of the last two dimensions of the first matrix."""

    def change(x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1]) if x.dim() > 1 else x.view(1, -1)
        rows[:size, :size] *= factor
        return x

    return changed(change, output)


def last_columns(factor: float = 0.0, count: int = 1, output: int = 0) -> Layer:
    def change(x: Tensor) -> Tensor:
        x[..., -count:] *= factor
        return x

    return changed(change, output)


def first_row(factor: float = 0.0, output: int = 0) -> Layer:
    def change(x: Tensor) -> Tensor:
        x[:1] *= factor
        return x

    return changed(change, output)


def swapped_rows(one: int = 0, other: int = 1, dim: int = 0, output: int = 0) -> Layer:
    def change(x: Tensor) -> Tensor:
        order = list(range(x.shape[dim]))
        order[one], order[other] = order[other], order[one]
        return x.index_select(dim, torch.tensor(order))

    return changed(change, output)


def rolled(by: int = 1, dim: int = 0, output: int = 0) -> Layer:
    return changed(lambda x: x.roll(by, dim), output)


def rounded(dtype: torch.dtype = torch.bfloat16, output: int = 0) -> Layer:
    """Rounded to a narrower dtype on the way."""
    return changed(lambda x: x.to(dtype).double(), output)


def noisy(relative: float, output: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(11)
    return changed(lambda x: x * (1 + relative * torch.randn(x.shape, generator=generator).double()), output)


def flushed(share: float, output: int = 0) -> Layer:
    """Magnitudes below a share of the root of the mean square become zero."""
    return changed(lambda x: torch.where(x.abs() < share * _rms(x), 0.0, x), output)


def saturated(share: float = 1.5, output: int = 0) -> Layer:
    def change(x: Tensor) -> Tensor:
        most = share * _rms(x)
        return x.clamp(-most, most)

    return changed(change, output)


def stale() -> Layer:
    """The buffer still holds the result of the call before, where shapes agree."""
    before: dict[Any, Tensor] = {}

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = kernel(*args, **kwargs)
        first = result if isinstance(result, Tensor) else result[0]
        old, before[first.shape, first.dtype] = before.get((first.shape, first.dtype)), first.detach().clone()
        if old is not None:
            first.detach().copy_(old)
        return result

    layer.sees_all = True
    return layer


def short_sum(count: int = 1) -> Layer:
    """The last `count` terms of a product's sums are dropped: mm, addmm, bmm, baddbmm."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        *first, a, b = args
        return kernel(*first, a[..., :-count], b[..., :-count, :], **kwargs)

    return layer


def short_reduction(count: int = 1) -> Layer:
    """A reduction over the last dimension does not see its last `count` elements; what is missing counts as zero."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0].clone()
        x[..., -count:] = 0
        return kernel(x, *args[1:], **kwargs)

    return layer


def accumulated(dtype: torch.dtype = torch.bfloat16, block: int = 4) -> Layer:
    """Partial sums over `block` terms of a product are added up in a narrow dtype: mm, addmm, bmm."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        *first, a, b = args
        if first and first[0].dim() < 2:
            first[0] = first[0].expand(a.shape[0], b.shape[1])
        total = (first[0] if first else torch.zeros(())).to(dtype)
        for at in range(0, a.shape[-1], block):
            part = (a[..., at : at + block].double() @ b[..., at : at + block, :].double()).to(dtype)
            total = total + part
        return total.to(a.dtype)

    return layer


def narrow_inputs(dtype: torch.dtype = torch.bfloat16) -> Layer:
    """Operands are rounded to a narrower dtype, as a fast path of a matrix unit does."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut = [a.to(dtype).to(a.dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return kernel(*cut, **kwargs)

    return layer


def short_mantissa(bits: int = 10) -> Layer:
    """Operands in float32 keep this many bits of their mantissa: 10 is TF32."""

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        return ((x.contiguous().view(torch.int32) + (1 << (22 - bits))) & -(1 << (23 - bits))).view(torch.float32)

    return lambda kernel, args, kwargs: kernel(*map(cut, args), **kwargs)


def misread(at: int) -> Layer:
    """An operand that is not contiguous is read as if it were."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = torch.empty(args[at].shape, device="meta").stride()
        return kernel(*args[:at], args[at].as_strided(args[at].shape, plain), *args[at + 1 :], **kwargs)

    return layer


def unwritten(value: float, count: int = 3, output: int = 0) -> Layer:
    """The last elements were not written: memory still holds something else."""

    def change(x: Tensor) -> Tensor:
        x.view(-1)[-count:] = value
        return x

    return changed(change, output)


def not_done(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A kernel that works in place has not run when its result is read."""
    return args[0]


def argument(at: int, value: Any) -> Layer:
    """The kernel ignores an argument, and works with another value: the eps of a norm, the slope of a leaky relu."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kernel(*args[:at], value(args[at]) if callable(value) else value, *args[at + 1 :], **kwargs)

    return layer


def keyword_argument(**values: Callable[[Any], Any]) -> Layer:
    """The kernel works with another value of a keyword: `value` of addcdiv_, `alpha` of add_."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kernel(*args, **{key: values[key](each) if key in values else each for key, each in kwargs.items()})

    return layer


def one_update(number: int, factor: float) -> Layer:
    """A kernel on lists changes one of its tensors too much: the update of one parameter by a fused optimizer."""

    def layer(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = args[0][number].clone()
        result = kernel(*args, **kwargs)
        args[0][number].sub_(before).mul_(factor).add_(before)
        return result

    return layer


def index_off(at: int, limit: Callable[..., int]) -> Layer:
    """An index is one too large, and wraps around at `limit(*args)`."""
    return lambda kernel, args, kwargs: kernel(*args[:at], (args[at] + 1) % limit(*args), *args[at + 1 :], **kwargs)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()

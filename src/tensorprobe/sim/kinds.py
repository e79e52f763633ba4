"""The ways in which the simulated device can be wrong: a table from the name of a kind to the function that does it.

Most kinds spoil a right result: `(tensor, **params) -> tensor`. A few replace the whole execution: they get the
`OpCall`, may run it, and return its result. Parameters are keyword-only and have defaults, so the table
documents every kind.

Kinds never write to the inputs of the op and never use torch's own random stream.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.sim.memory import map_tensors, tensors_in

_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class OpCall:
    """One execution of an op on host aliases; `memory` belongs to one installed fault and lives as long as it."""

    name: str
    operation: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: frozenset[str] = frozenset()
    """Keyword arguments that are written to."""
    memory: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> list[Any]:
        """Return the arguments that are read."""
        return [*self.args, *[value for key, value in self.kwargs.items() if key not in self.outputs]]

    def run(self) -> Any:
        """Return the right result."""
        return self.operation(*self.args, **self.kwargs)


def scale(out: Tensor, *, factor: float = 1.01) -> Tensor:
    """Every element times `factor`."""
    return (out * factor).to(out.dtype)


def bias(out: Tensor, *, amount: float = 1e-2) -> Tensor:
    """Every element plus `amount`."""
    return (out + amount).to(out.dtype)


def rounding(out: Tensor, *, bits: int = 7) -> Tensor:
    """Truncated towards zero to `bits` bits of mantissa instead of rounded to nearest."""
    if out.dtype == torch.float64:
        mask = -(1 << (52 - bits))
        return (out.contiguous().view(torch.int64) & mask).view(torch.float64).view(out.shape)
    single = out.float().contiguous()
    return (single.view(torch.int32) & -(1 << (23 - bits))).view(torch.float32).view(out.shape).to(out.dtype)


def flush_subnormals(out: Tensor, *, threshold: float = 0.0) -> Tensor:
    """Magnitudes below `threshold` (0: the smallest normal number of the dtype) become zero."""
    limit = threshold or torch.finfo(out.dtype).tiny
    return torch.where(out.abs() < limit, torch.zeros_like(out), out)


def _dim(out: Tensor, dim: int) -> int:
    """Return the dimension, or the last one of a tensor with fewer: a fault applies to tensors of any shape."""
    return dim if -out.dim() <= dim < out.dim() else -1


def tail(out: Tensor, *, block: int = 1, dim: int = -1, factor: float = 0.0) -> Tensor:
    """The last `block` entries along `dim` are multiplied by `factor`, as when the last tile of a kernel is not
    handled.
    """
    wrong = out.clone()
    if out.dim() == 0:
        return wrong * factor
    dim = _dim(out, dim)
    size = out.size(dim)
    wrong.narrow(dim, max(size - block, 0), min(block, size)).mul_(factor)
    return wrong


def every(out: Tensor, *, n: int = 4, start: int = 0, dim: int = -1, factor: float = 0.0) -> Tensor:
    """Every `n`-th entry along `dim`, from `start` on, is multiplied by `factor`, as when one lane of a unit is broken."""
    wrong = out.clone()
    if out.dim():
        wrong.movedim(_dim(out, dim), 0)[start::n].mul_(factor)
    return wrong


def tile(out: Tensor, *, row: int = 0, column: int = 0, rows: int = 8, columns: int = 8, factor: float = 0.0) -> Tensor:
    """One block of rows and columns is multiplied by `factor`, in every matrix of the tensor."""
    wrong = out.clone()
    if out.dim() > 1:
        wrong[..., row : row + rows, column : column + columns].mul_(factor)
    return wrong


def element(out: Tensor, *, index: int = 0, amount: float = 1.0, value: float | None = None) -> Tensor:
    """The one element at the flat `index` (negative: from the end; beyond the end: counted on from the start) is `value`, or
    `amount` too large.
    """
    wrong = out.contiguous().clone()
    flat = wrong.view(-1)
    if flat.numel():
        at = index % flat.numel()
        flat[at] = flat[at] + amount if value is None else value
    return wrong


def swap_rows(out: Tensor, *, dim: int = 0, first: int = 0, second: int = 1) -> Tensor:
    """Two slices along `dim` change places; where there are fewer, the first and the last."""
    if out.dim() == 0:
        return out
    dim = _dim(out, dim)
    if out.size(dim) <= max(first, second):
        first, second = 0, out.size(dim) - 1
    if first == second or second < 0:
        return out
    order = torch.arange(out.size(dim))
    order[first], order[second] = second, first
    return out.index_select(dim, order)


def roll(out: Tensor, *, dim: int = 0, by: int = 1) -> Tensor:
    """Slices along `dim` land `by` places further, as with an address that is off by one row."""
    return out.roll(by, _dim(out, dim)) if out.dim() else out


def overflow(out: Tensor, *, limit: float = 0.0) -> Tensor:
    """Magnitudes above `limit` (0: the largest element) become infinite with their sign."""
    if not out.numel():
        return out
    reached = out.abs() > limit if limit else out.abs() == out.abs().max()
    return torch.where(reached, torch.copysign(torch.full_like(out, math.inf), out), out)


def nan(out: Tensor, *, index: int = 0) -> Tensor:
    """The element at the flat `index` is NaN."""
    return element(out, index=index, value=math.nan)


def gradient(out: Tensor, *, factor: float = 0.5) -> Tensor:
    """Every element times `factor`, in backward only: the forward pass is right."""
    return scale(out, factor=factor)


def nondeterminism(out: Tensor, *, relative: float = 1e-3) -> Tensor:
    """Noise of that relative size, different in each process and call: two runs never agree."""
    source = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
    noise = torch.randn(out.shape, generator=source) * relative + 1
    return (out * noise).to(out.dtype)


def stale(call: OpCall) -> Any:
    """The result of the previous call, where shapes agree; the first call is right."""
    result = call.run()
    previous = call.memory.get("previous")
    witness("stale", result, call.memory)
    if previous is None or _shapes(previous) != _shapes(result):
        return result
    return previous


def witness(kind: str, result: Any, memory: dict[str, Any]) -> None:
    """Show a fault the right result of a matching call: `stale` needs the previous result."""
    if kind == "stale":
        memory["previous"] = map_tensors(torch.clone, result)


def compute_in(call: OpCall, *, precision: str = "bfloat16") -> Any:
    """Inputs and results are rounded to `precision`, as when a kernel silently works in a narrower type."""

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(_float_type(precision)).to(tensor.dtype) if tensor.is_floating_point() else tensor

    kwargs = {k: value if k in call.outputs else map_tensors(rounded, value) for k, value in call.kwargs.items()}
    return map_tensors(rounded, call.operation(*map_tensors(rounded, tuple(call.args)), **kwargs))


def accumulate(call: OpCall, *, precision: str = "float16", block: int = 8) -> Any:
    """Partial sums over `block` terms are added up in `precision`: matrix products, convolutions, sums and means."""
    return accumulate_in(call.name, call.args, call.kwargs, _float_type(precision), block)


def drop_contribution(call: OpCall) -> Any:
    """What this process adds to a collective counts as zero; use with `rank`."""
    target, rest = call.args[0], tuple(call.args[1:])
    if tensors_in(rest):  # inputs of their own: they stay as they are, zeros are sent instead
        return call.operation(target, *map_tensors(torch.zeros_like, rest))
    for tensor in tensors_in(target):
        tensor.zero_()
    return call.run()


def error(call: OpCall, *, message: str = "device-side failure, error code 507015") -> Any:
    """The op raises RuntimeError, in the forward pass or in the thread that runs backward."""
    raise RuntimeError(f"simulated device error in {call.name}: {message}")


SPOILERS: dict[str, Callable[..., Tensor]] = {
    "scale": scale,
    "bias": bias,
    "rounding": rounding,
    "flush-subnormals": flush_subnormals,
    "tail": tail,
    "every": every,
    "tile": tile,
    "element": element,
    "swap-rows": swap_rows,
    "roll": roll,
    "overflow": overflow,
    "nan": nan,
    "gradient": gradient,
    "nondeterminism": nondeterminism,
}
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "stale": stale,
    "compute-in": compute_in,
    "accumulate": accumulate,
    "drop-contribution": drop_contribution,
    "error": error,
}
KINDS: dict[str, Callable[..., Any]] = SPOILERS | REPLACEMENTS


def parameters_of(kind: str) -> dict[str, Any]:
    """Return the keyword parameters of a kind with their defaults."""
    signature = inspect.signature(KINDS[kind])
    return {p.name: p.default for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _float_type(precision: str) -> torch.dtype:
    if precision not in _FLOATS:
        raise SettingsError(
            f"precision {precision!r} is none of {', '.join(_FLOATS)}.{did_you_mean(precision, _FLOATS)}"
        )
    return _FLOATS[precision]


def perform(kind: str, call: OpCall, output: int | None, params: dict[str, Any]) -> tuple[Any, bool]:
    """Return the faulty result of `call`, and whether it may differ from the right one.

    `output` chooses which floating-point output is changed, None all of them.
    """
    if kind in REPLACEMENTS:
        had_previous = kind != "stale" or "previous" in call.memory
        return REPLACEMENTS[kind](call, **params), had_previous
    position, changed = -1, False

    def spoiled(tensor: Tensor) -> Tensor:
        nonlocal position, changed
        position += 1
        if not (tensor.is_floating_point() or tensor.is_complex()) or output not in (None, position):
            return tensor
        wrong = SPOILERS[kind](tensor, **params)
        changed = changed or not torch.equal(wrong, tensor)
        return wrong

    return map_tensors(spoiled, call.run()), changed


def _shapes(value: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(value)]


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
    channels = 0 if transposed else 1  # the dimension of the weight that has the channels of the input

    def of_group(x: Tensor, weight: Tensor) -> Tensor:
        parts = (
            torch.ops.aten.convolution.default(
                x[:, start : start + block], weight.narrow(channels, start, min(block, x.size(1) - start)), None, stride,
                padding, dilation, transposed, output_padding, 1,
            )
            for start in range(0, x.size(1), block)
        )  # fmt: skip
        return _running_total(parts, dtype).to(x.dtype)

    total = torch.cat([of_group(*parts) for parts in zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)], 1)
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
    """Compute the op with its running total in `dtype`, as some accelerators do.

    The terms of a block are summed as usual. Each block's sum is added to a total that is rounded to `dtype` after every
    addition. Raises SettingsError for an op that is not known.
    """
    if name not in _KNOWN:
        raise SettingsError(f"kind 'accumulate' knows {', '.join(sorted(_KNOWN))}; not {name}. Try kind 'compute-in'.")
    return _KNOWN[name](args, kwargs, dtype, block)

"""The evidence on a result: its error against a reference, the CPU's own error, and how far rounding moves it.

Before a result is called wrong, the CPU runs the call a few more times, in its own dtype and in that of the reference, each
time with inputs that differ in their last bits. A sum that cancels, a division by almost nothing, or a gradient that is
mathematically zero then changes a lot. A real error does not. This is done only where the verdict would be a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy
import torch

from tensorprobe.judge.standards import Evidence, holds_elements
from tensorprobe.model import DTYPES
from tensorprobe.model.measured import Opinion
from tensorprobe.numerics.masks import LEAST_MASK, MASK_RATIO
from tensorprobe.numerics.pairs import derive, measure_pairs
from tensorprobe.ops import Trait, traits_of
from tensorprobe.replay.inputs import generator
from tensorprobe.replay.layout import laid_out

Figures = Mapping[str, float]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values on the CPU, contiguous."""
    if tensor._is_zerotensor():  # zeros without memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def measure(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Figures]:
    """Return the figures of each pair (reference, result). Both are on the CPU and have equal shapes."""
    if not pairs:
        return []
    rows = [
        (one.data_ptr(), other.data_ptr(), one.numel(), _code(one.dtype), _code(other.dtype)) for one, other in pairs
    ]
    raw = measure_pairs(numpy.array(rows, dtype=numpy.int64))
    figures = derive(raw)
    return [{name: column[at].item() for name, column in figures.items()} for at in range(len(pairs))]


def within_range(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the reference limited to the range of `dtype`: too large becomes inf, too small is rounded."""
    if not (wide.dtype.is_floating_point and dtype.is_floating_point) or dtype is wide.dtype or dtype.itemsize < 2:
        return wide
    edges = torch.finfo(dtype)
    if wide.numel():
        sizes = wide.abs()
        low, high = sizes.aminmax()
        if high <= edges.max and (low >= edges.tiny or not ((sizes < edges.tiny) & (sizes > 0)).any()):  # false for NaN
            return wide
    rounded = wide.to(dtype)
    beyond = (rounded.isinf() | (wide.abs() < edges.tiny)) & (rounded.to(wide.dtype) != wide)
    return torch.where(beyond, rounded.to(wide.dtype), wide) if beyond.any() else wide


def shared_mask(wide: torch.Tensor, result: torch.Tensor) -> torch.Tensor | None:
    """Return where both hold a huge constant, such as that of an attention mask, as `numerics.masks` says; None if nowhere."""
    if not (wide.is_floating_point() and result.is_floating_point()) or wide.numel() < 2 or result.dtype.itemsize < 2:
        return None
    # torch before 2.2 has no such kernel for halves
    ends = [
        float(end)
        for end in (wide.float() if wide.dtype is torch.float16 else wide).aminmax()
        if LEAST_MASK <= abs(float(end)) < math.inf
    ]
    if not ends:
        return None
    rounded = wide.to(result.dtype)
    apart = torch.zeros(wide.shape, dtype=torch.bool)
    for end in ends:
        value = torch.tensor(end, dtype=wide.dtype).to(result.dtype)
        apart |= (rounded == value) & (result == value)
    rest = float(wide.masked_fill(apart, 0).abs().max())
    return apart if int(apart.sum()) > 1 and MASK_RATIO * rest <= min(map(abs, ends)) else None


def beyond_rounding(wide: torch.Tensor, result: torch.Tensor) -> float:
    """Return the largest error of an element beyond the rounding of that element to its dtype."""
    error = (result.to(wide.dtype) - wide).abs() - torch.finfo(result.dtype).eps * wide.abs()
    error = error[error.isfinite()]
    return max(0.0, float(error.max())) if error.numel() else 0.0


def size_of(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the RMS and the largest magnitude of the finite values, of complex ones as real and imaginary parts."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    if not values.numel():
        return 0.0, 0.0
    low, high = values.aminmax()
    if not (low.isfinite() and high.isfinite()):  # to look at each value takes many times as long
        values = values[values.isfinite()]
        if not values.numel():
            return 0.0, 0.0
        low, high = values.aminmax()
    return float(values.norm()) / math.sqrt(values.numel()), max(-float(low), float(high))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in runs and in the judge."""
    return str(dtype).removeprefix("torch.")


def _code(dtype: torch.dtype) -> int:
    return DTYPES[dtype_name(dtype)].code


TIMES, TIMES_HARD = 3, 10
"""The number of changed inputs to try. Results jump at discontinuities; more tries show how far."""
_HALF = (torch.float16, torch.bfloat16)
_SPARSE = 8
"""Half-precision kernels compute in a wider dtype, so only one input in this many is changed."""

Tensors = Mapping[str, torch.Tensor]


def nudged(tensors: Tensors, key: str, *, sparse: bool) -> dict[str, torch.Tensor]:
    """Return the tensors with the last bit of floating-point values changed, up or down depending on the key."""
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
    # The last bit of all subnormal numbers has the same value. Zeros are often intentional, and stay.
    moved = (wide + wide * rounding.eps * change + (wide != 0) * change * rounding.tiny * rounding.eps).to(tensor.dtype)
    kept = torch.where(moved.isfinite(), moved, tensor)
    if (
        mask := shared_mask(wide, tensor)
    ) is not None:  # a mask moved by a bit moves further than everything else is large
        kept = torch.where(mask, tensor, kept)
    # Keep the strides: another layout may take another path through the kernel.
    return kept if tensor.is_contiguous() else laid_out(kept, tensor.stride())


def spread(moves: Iterable[tuple[Tensors, Tensors]], wide: Tensors) -> dict[str, Figures]:
    """Return for each slot the worst figures of all changes (results before, results after), against the reference `wide`."""
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
    """Return the reference plus the change of the result. Integers change where they differ."""
    if not (wide.is_floating_point() or wide.is_complex()):
        return torch.where(base == result, wide, result.to(wide.dtype)).contiguous()
    one, other = base.to(wide.dtype), result.to(wide.dtype)
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, wide, wide + (other - one)).contiguous()


def _worse(one: Figures, other: Figures) -> Figures:
    """Return the larger of each figure; of shares and of the slope, the one further from 1."""
    worst = {}
    for name, value in one.items():
        if name == "slope":
            worst[name] = max(value, other[name], key=lambda slope: abs(slope - 1))
        elif name == "bias":
            worst[name] = max(value, other[name], key=abs)
        else:
            worst[name] = (min if name.startswith("within") else max)(value, other[name])
    return worst


_FLOATING = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128))
_LOOKED_AT, _FEW_VALUES = 1 << 16, 64


def gather(
    op: str,
    direction: str,
    hosts: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    own: Mapping[str, torch.Tensor],
    *,
    strict: bool = False,
    inputs: Sequence[torch.Tensor] = (),
) -> dict[str, Evidence]:
    """Return the evidence on each slot of `hosts` (reference, result of the device), all on the CPU; `own` may lack some.

    Of the `inputs` of the call only sizes and dtypes are used.
    """
    sizes, grain = [tensor.numel() for tensor in inputs], grain_of(inputs)
    figures = measure(
        list(hosts.values())
        + [(wide.to(result.dtype), result) for wide, result in hosts.values()]
        + [(hosts[name][0], own[name]) for name in own]
    )
    owns = dict(zip(own, figures[2 * len(hosts) :], strict=True))
    found = {}
    for at, (name, (wide, result)) in enumerate(hosts.items()):
        scale, largest = size_of(wide)
        found[name] = Evidence(
            op=op,
            direction=direction,
            dtype=dtype_name(result.dtype),
            device=figures[at],
            own=owns.get(name),
            ideal=figures[len(hosts) + at],
            scale=scale,
            largest=largest,
            beyond=(beyond_rounding(wide, result), beyond_rounding(wide, own[name]))
            if name in own and holds_elements(op, dtype_name(result.dtype))
            else None,
            strict=strict,
            terms=count_terms(op, sizes, result.numel()),
            grain=grain,
        )
    return found


def weigh(
    evidence: dict[str, Evidence],
    wides: Mapping[str, torch.Tensor],
    judge: Callable[[str, Evidence], Opinion],
    *,
    doubts: Callable[[str], bool],
    spread: Callable[[Mapping[str, torch.Tensor]], dict[str, Figures]],
) -> dict[str, Opinion]:
    """Return an opinion on each slot. Before a slot fails a standard that asks for it, its spread is measured and kept in `evidence`."""
    opinions = {slot: judge(slot, each) for slot, each in evidence.items()}
    if any(doubts(slot) for slot, opinion in opinions.items() if not opinion.passes):
        for slot, figures in spread(wides).items():
            few = evidence[slot].device["count"] > 1 and few_values(wides[slot])
            evidence[slot] = evidence[slot]._replace(spread=figures, few=few)
            opinions[slot] = judge(slot, evidence[slot])
    return opinions


def count_terms(op: str, sizes: Sequence[int], count: int) -> float:
    """Estimate from the sizes of the inputs how many terms are summed for each of `count` elements."""
    count = max(count, 1)
    traits = traits_of(op.replace("_backward", ""))
    if traits & Trait.MULTIPLIES and not traits & Trait.ROUNDED_ONCE:
        largest, second = sorted((*sizes, 1, 1))[-1:-3:-1]
        return max(1.0, math.sqrt(largest * second / count))
    return max(1.0, max(sizes, default=1) / count)


def grain_of(inputs: Iterable[torch.Tensor]) -> float:
    """Return the coarsest eps among the floating-point inputs; 0 without any."""
    return max((torch.finfo(each.dtype).eps for each in inputs if each.dtype in _FLOATING), default=0.0)


def few_values(wide: torch.Tensor) -> bool:
    """Return whether a result has too few distinct values for their roundings to be independent."""
    flat = wide.flatten()[:_LOOKED_AT]
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return flat.numel() > 1 and bool(flat.unique().numel() < min(_FEW_VALUES, flat.numel() / 2))

"""The evidence on results in memory: of the device, of the reference, and of the CPU in the call's own dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tensorprobe.judge.standards import Evidence, rounds_once
from tensorprobe.model.measured import Opinion
from tensorprobe.ops import Trait, traits_of
from tensorprobe.replay.measuring import Figures, beyond_rounding, dtype_name, finite_part, measure

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
    """What is known of each slot of `hosts` (reference, result of the device), all on the host; `own` may lack some.

    `inputs` are those of the call, of which only sizes and dtypes are looked at.
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
        finite = finite_part(wide)
        found[name] = Evidence(
            op=op,
            direction=direction,
            dtype=dtype_name(result.dtype),
            device=figures[at],
            own=owns.get(name),
            ideal=figures[len(hosts) + at],
            scale=float(finite.square().mean().sqrt()) if finite.numel() else 0.0,
            largest=float(finite.abs().max()) if finite.numel() else 0.0,
            beyond=(beyond_rounding(wide, result), beyond_rounding(wide, own[name]))
            if name in own and rounds_once(op, dtype_name(result.dtype))
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
    """An opinion on each slot. Before one is called wrong whose standard doubts, its spread is asked for, and kept in `evidence`."""
    opinions = {slot: judge(slot, each) for slot, each in evidence.items()}
    if any(doubts(slot) for slot, opinion in opinions.items() if not opinion.passes):
        for slot, figures in spread(wides).items():
            few = evidence[slot].device["count"] > 1 and few_values(wides[slot])
            evidence[slot] = evidence[slot]._replace(spread=figures, few=few)
            opinions[slot] = judge(slot, evidence[slot])
    return opinions


def count_terms(op: str, sizes: Sequence[int], count: int) -> float:
    """About how many terms are added up for each of `count` elements, as far as the sizes of the inputs tell."""
    count = max(count, 1)
    traits = traits_of(op.replace("_backward", ""))
    if traits & Trait.MULTIPLIES and not traits & Trait.ROUNDED_ONCE:
        largest, second = sorted((*sizes, 1, 1))[-1:-3:-1]
        return max(1.0, math.sqrt(largest * second / count))
    return max(1.0, max(sizes, default=1) / count)


def grain_of(inputs: Iterable[torch.Tensor]) -> float:
    """The coarsest rounding among the floating inputs; 0 without any."""
    return max((torch.finfo(each.dtype).eps for each in inputs if each.dtype in _FLOATING), default=0.0)


def few_values(wide: torch.Tensor) -> bool:
    """Whether a result has so few different values that their roundings are not independent."""
    flat = wide.flatten()[:_LOOKED_AT]
    return flat.numel() > 1 and bool(flat.unique().numel() < min(_FEW_VALUES, flat.numel() / 2))

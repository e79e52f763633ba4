"""Edge-case inputs: rare in ordinary data, and often wrong in kernels.

A table from the name of a variant to the function that makes it from the ordinary inputs. Floating-point tensors change;
integers, bools and infinities, which are masks, do not. A variant that makes no sense for an op (the reference raises, or
its result is NaN or beyond the dtype) is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch

from tensorprobe.model.precheck import NO_DROPOUT
from tensorprobe.ops import Trait, breaks_ties, has
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.evidence import on_host
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import generator
from tensorprobe.replay.layout import laid_out, room
from tensorprobe.replay.once import Replay
from tensorprobe.replay.randomness import without_dropout
from tensorprobe.replay.runs import STRICT, Conditions, Runs, said

Tensors = dict[str, torch.Tensor]
_LARGEST_ROOM = 1 << 28
_ASTRAY = 0.1
_HALF = (torch.float16, torch.bfloat16)


class Unsuitable(Exception):
    """A variant makes no sense for a call."""


def zeros(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Return zeros."""
    return torch.zeros_like(tensor)


def subnormals(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Return subnormal numbers of both signs."""
    drawn = torch.rand(tensor.shape, generator=source, dtype=torch.float64) * 2 - 1
    return (drawn * torch.finfo(tensor.dtype).tiny).to(tensor.dtype)


def ties(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Return three distinct values, each many times."""
    levels = tensor.flatten()[[0, tensor.numel() // 2, -1]]
    return levels[torch.randint(0, 3, tensor.shape, generator=source)]


def offset(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Return values with a mean many times their spread."""
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    spread = float(finite.max() - finite.min()) if finite.numel() else 0.0
    return (wide + (16 if tensor.dtype in _HALF else 1024) * (spread or 1.0)).to(tensor.dtype)


def non_contiguous(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Return the same values with reversed dimensions in memory and gaps between elements."""
    stride, step = [], 2
    for size in tensor.shape:
        stride.append(step)
        step *= size
    if room(tensor.shape, stride) > _LARGEST_ROOM:
        raise Unsuitable(f"{tensor.numel():,} elements with gaps are too many")
    return laid_out(tensor, stride)


_CHANGES: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "zeros": zeros,
    STRICT: subnormals,
    "ties": ties,
    "offset": offset,
    "non-contiguous": non_contiguous,
}
_SHARES = ((1.0, 0.25), (0.5, 0.25), (0.5, 2.0**-6), (1 / 3, 0.25))
"""Powers of the largest number of the dtype, and factors: for sums, products, sums of products, cubes."""
VARIANTS = (*_CHANGES, "near-overflow")


def make_variant(call: StoredCall, ordinary: Runs, conditions: Conditions) -> Runs:
    """Return the replays of a call with a variant of its inputs. Raises Unsuitable or CannotReplay if that makes no sense."""
    variant = conditions.variant
    if variant == NO_DROPOUT:
        calm = copy(call)
        calm.model = without_dropout(call.model) or call.model
        return Runs(calm, ordinary.inputs, conditions)
    changeable = [name for name, tensor in ordinary.inputs.items() if _changes(tensor, variant)]
    if not changeable:
        raise Unsuitable("it has no floating-point input to change")
    if variant == "near-overflow":
        _demand_values(call, ordinary)
        return Runs(call, _near_overflow(call, ordinary, changeable), conditions)
    inputs = dict(ordinary.inputs)
    for name in changeable:
        tensor = inputs[name]
        changed = _CHANGES[variant](tensor, generator(f"{call.name}:{name}:{variant}"))
        inputs[name] = changed if variant == "non-contiguous" else _kept(changed, tensor)
    return Runs(call, inputs, conditions)


def _demand_values(call: StoredCall, ordinary: Runs) -> None:
    """Raise Unsuitable if large numbers become integers: the result is undefined, and may be used as an address."""
    whole = any(
        not output.is_floating_point() and not output.is_complex() and output.dtype is not torch.bool
        for output in ordinary.device.outputs.values()
    )
    if has(call.op, Trait.COORDINATES) or (whole and not breaks_ties(call.op)):
        raise Unsuitable("no integer is as large as the largest number of the dtype")


def _changes(tensor: torch.Tensor, variant: str) -> bool:
    if variant == "non-contiguous":
        return bool(tensor.numel() > 1)
    return bool(tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel())


def _kept(changed: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Replace the finite values, and keep infinities and strides."""
    values = torch.where(tensor.isfinite(), changed, tensor)
    return values if tensor.is_contiguous() else laid_out(values, tensor.stride())


def _near_overflow(call: StoredCall, ordinary: Runs, names: list[str]) -> Tensors:
    """Return the inputs scaled up as far as results and intermediate values stay within the dtype."""
    for power, factor in _SHARES:
        inputs = dict(ordinary.inputs)
        for name in names:
            tensor = inputs[name]
            finite = tensor[tensor.isfinite()]
            largest = float(finite.abs().max()) if finite.numel() else 0.0
            target = factor * torch.finfo(tensor.dtype).max ** power
            grown = (tensor.double() * (target / largest if largest else 1.0)).to(tensor.dtype)
            inputs[name] = _kept(grown, tensor)
        if _stays_meaningful(call, ordinary, inputs):
            return inputs
    raise Unsuitable("larger inputs leave the range of the dtype")


def _stays_meaningful(call: StoredCall, ordinary: Runs, inputs: Tensors) -> bool:
    """Return whether results fit the dtype and the CPU's own first digits are right: then nothing overflowed inside."""
    try:
        wide = Replay(call.model, inputs, precision="double").outputs
        own = Replay(call.model, inputs).outputs
    except CannotReplay:
        raise
    except Exception as error:
        raise Unsuitable(f"the reference raised {said(error)}") from None
    for name, output in ordinary.device.outputs.items():
        if name not in wide or not output.is_floating_point() or wide[name].shape != output.shape:
            continue
        before, value, mine = on_host(output), on_host(wide[name]).double(), on_host(own[name]).double()
        seen = before.isfinite()
        beyond = (value.abs() > torch.finfo(before.dtype).max / 2) | ~value.isfinite() | ~mine.isfinite()
        if bool((beyond & seen).any()) or bool((mine - value)[seen].norm() > _ASTRAY * value[seen].norm()):
            return False
    return True

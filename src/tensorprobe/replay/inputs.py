"""The tensors that go into a call: those that were recorded, or random ones with the recorded dtype, shape, stride and range.

Random tensors are drawn from the name of the call and the slot: each rerun and each order of calls gives the same. What an
op asks of its inputs beyond their range stands in `constraints`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import xxhash

from tensorprobe.errors import NoData, RunError
from tensorprobe.model import Slot, Summary
from tensorprobe.model.reason import Unrecorded
from tensorprobe.record.elements import demand_shape
from tensorprobe.record.stored import StoredCall, StoredSlot
from tensorprobe.replay.constraints import constrain
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.layout import distinct, laid_out, room

Data = Literal["random", "real"]

_EXTREME = 1e30
"""A range beyond this is that of a mask: nothing lies between its ends."""
_LARGEST_BYTES = 8 << 30
_UNKNOWN = Summary(1.0, -1.0, 0.0, 1.0)


def make_inputs(call: StoredCall, data: Data) -> dict[str, torch.Tensor]:
    """The tensors of a forward call by slot, on the CPU, in their own dtype. CannotReplay where one cannot be made."""
    made = {}
    for slot in call.slots:
        if slot.side != "output":
            key = f"{call.name}:{slot.name}"
            made[slot.name] = real(slot) if data == "real" and slot.skipped is None else draw(slot.model, key)
    if data == "random":
        constrain(call.model, made, generator(call.name))
    return made


def all_recorded(call: StoredCall) -> bool:
    """Whether the values of every input are in the record."""
    return all(slot.has_data or slot.skipped is not None for slot in call.slots if slot.side != "output")


def real(slot: StoredSlot) -> torch.Tensor:
    """The recorded values, as a copy with the recorded strides."""
    try:
        found = slot.tensor()
    except (NoData, RunError) as error:
        raise CannotReplay(f"{slot.name}: {str(error).splitlines()[0]}") from None
    wanted = slot.stride
    if wanted is None or found.stride() == tuple(wanted) or not _fits(slot.model, found.dtype):
        return found.clone()
    return laid_out(found, wanted)


def generator(key: str) -> torch.Generator:
    """A source of random numbers that depends on the key alone."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)


def draw(slot: Slot, key: str) -> torch.Tensor:
    """A random tensor: uniform between the recorded minimum and maximum, which are its first and its last element."""
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype) or slot.unrecorded not in (None, Unrecorded.WRITTEN_ONLY):
        raise CannotReplay(f"{slot.name} is a {slot.skipped or slot.dtype}")
    try:
        demand_shape(slot)
    except RunError as error:
        raise CannotReplay(f"{slot.name}: {error}") from None
    if not _fits(slot, dtype):
        raise CannotReplay(f"{slot.name} has {slot.count:,} elements")
    stride = slot.stride if slot.stride is not None else torch.empty(slot.shape, device="meta").stride()
    flat = _values(room(slot.shape, stride), dtype, slot.summary or _UNKNOWN, generator(key))
    tensor = flat.as_strided(slot.shape, stride)
    if slot.summary is not None and slot.summary.inf and slot.shape and slot.count:
        _leave_something(tensor)
    return tensor


def _leave_something(mask: torch.Tensor) -> None:
    """A row that is masked everywhere has no right answer: some devices give NaN, others zero."""
    places = distinct(mask)
    if places is not None:
        column = places.select(-1, 0)
        column.copy_(torch.where(column.isinf(), torch.zeros_like(column), column))


def _fits(slot: Slot, dtype: torch.dtype) -> bool:
    stride = slot.stride if slot.stride is not None else ()
    elements = max(slot.count, room(slot.shape, stride) if slot.stride is not None else 0)
    return bool(elements * dtype.itemsize <= _LARGEST_BYTES)


def _values(count: int, dtype: torch.dtype, summary: Summary, source: torch.Generator) -> torch.Tensor:
    low, high = _range(summary, dtype, count)
    if dtype is torch.bool:
        share = float(summary.mean) if 0 < float(summary.mean) < 1 else 0.5
        return torch.rand(count, generator=source) < share
    if dtype.is_complex:
        parts = torch.rand((count, 2), generator=source, dtype=torch.float64) * (high - low) + low
        return torch.view_as_complex(parts).to(dtype)
    if not dtype.is_floating_point:
        flat = torch.randint(int(low), int(high) + 1, (count,), generator=source)
    elif high - low > _EXTREME:
        flat = torch.where(torch.rand(count, generator=source) < 0.5, low, high)
    else:
        flat = torch.rand(count, generator=source, dtype=torch.float64) * (high - low) + low
    if count:
        flat[0], flat[-1] = low, high
    flat = flat.to(dtype)
    return _with_infinities(flat, summary, source) if summary.inf and dtype.is_floating_point else flat


def _range(summary: Summary, dtype: torch.dtype, count: int) -> tuple[float, float]:
    """The recorded range as numbers of that dtype.

    A tensor of one value throughout (the weight of a norm before its first update) is given a range that begins there:
    in equal values no kernel can be seen to take the wrong one.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    low, high = (
        float(figure) if math.isfinite(float(figure)) else otherwise if floating else 0.0
        for figure, otherwise in ((summary.min, -1.0), (summary.max, 1.0))
    )
    low, high = min(low, high), max(low, high)
    if floating and low == high and count > 1 and abs(low) < _EXTREME and not summary.inf:
        wider = math.copysign(0.5 * max(abs(low), 1.0), low)
        low, high = min(low, low + wider), max(low, low + wider)
    return low, high


def _with_infinities(flat: torch.Tensor, summary: Summary, source: torch.Generator) -> torch.Tensor:
    """A mask holds -inf on purpose: about as many as were recorded, but never everywhere."""
    infinite = [value for value in (float(summary.max), float(summary.min)) if math.isinf(value)]
    chosen = torch.rand(flat.numel(), generator=source) < min(0.5, summary.inf / max(flat.numel(), 1))
    if infinite and chosen.any() and not chosen.all():
        flat[chosen] = infinite[-1]
    return flat

"""The inputs of a replay: recorded values, or random ones that are valid for the op.

Random inputs have the recorded dtypes, shapes, strides and ranges. Some ops ask for more: sorted boundaries, lengths that add
up, indices that are written to once, a mask that leaves something over. A table from the name of the op to a function corrects
such inputs in place. Recorded values are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import xxhash

from tensorprobe.errors import NoData, RunError
from tensorprobe.model import Call, Slot, Summary
from tensorprobe.model.reason import Unrecorded
from tensorprobe.ops import short_name
from tensorprobe.record.elements import demand_shape
from tensorprobe.record.stored import StoredCall, StoredSlot
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.layout import distinct, laid_out, room

Tensors = dict[str, torch.Tensor]
Constraint = Callable[[Call, Tensors, torch.Generator], None]


def constrain(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Make random inputs valid for their op."""
    name = short_name(call.op)
    found = _CONSTRAINTS.get(name) or _CONSTRAINTS.get(name.rstrip("_"))
    if found is not None and all(tensor.numel() for tensor in tensors.values()):
        # Write only to the real memory of an expanded tensor.
        views = {name: view for name, tensor in tensors.items() if (view := distinct(tensor)) is not None}
        found(call, views, source)


def _given(call: Call, tensors: Tensors, position: int, keyword: str) -> torch.Tensor | None:
    """Return the tensor of an argument, passed by position or keyword."""
    trees = call.args or []
    tree = trees[position] if position < len(trees) else (call.kwargs or {}).get(keyword)
    return tensors.get(tree["slot"]) if isinstance(tree, dict) and "slot" in tree else None


def _number(call: Call, position: int, keyword: str, otherwise: Any = None) -> Any:
    trees = call.args or []
    return trees[position] if position < len(trees) else (call.kwargs or {}).get(keyword, otherwise)


def _classes(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Class indices of a loss start at 0. A negative one marks ignored elements."""
    target = _given(call, tensors, 1, "target")
    if target is None or target.is_floating_point() or not int(target.min()) < 0 <= int(target.max()):
        return
    classes = torch.randint(0, int(target.max()) + 1, target.shape, generator=source)
    target.copy_(torch.where((target < 0) & (target > target.min()), classes, target))


def _sorted(position: int, keyword: str) -> Constraint:
    def sort(call: Call, tensors: Tensors, source: torch.Generator) -> None:
        found = _given(call, tensors, position, keyword)
        if found is not None:
            found.copy_(found.sort().values)

    return sort


def _offsets(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Offsets of bags: sorted, starting at 0."""
    found = _given(call, tensors, 2, "offsets")
    if found is not None:
        found.copy_(found.sort().values)
        found[0] = 0


def _positive_definite(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    matrix = tensors.get("input.0")
    if matrix is not None and matrix.ndim >= 2 and matrix.shape[-1] == matrix.shape[-2]:
        wide = matrix.to(torch.complex128 if matrix.is_complex() else torch.float64)
        size = wide.shape[-1]
        product = wide @ wide.mH / size + wide.abs().square().amax() * torch.eye(size)
        matrix.copy_(product.to(matrix.dtype))


def _written_once(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """If two values go to one index, the result is undefined: use every index once along the dimension."""
    target, index = _given(call, tensors, 0, "input"), _given(call, tensors, 2, "index")
    dim = _number(call, 1, "dim")
    if target is None or index is None or not isinstance(dim, int) or not target.ndim or index.dtype is not torch.int64:
        return
    dim %= target.ndim
    along = dim if index.ndim == target.ndim else 0
    size = target.shape[dim]
    if index.shape[along] <= size:
        shape = [size if at == along else length for at, length in enumerate(index.shape)]
        order = torch.rand(shape, generator=source).argsort(along)
        index.copy_(order.narrow(along, 0, index.shape[along]))


def _stored_once(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """The same for `x[index] = values` with one index tensor."""
    if _number(call, 3, "accumulate") is True:
        return
    indices = [tensors[name] for name in _slots((call.args or [None, None])[1]) if name in tensors]
    for index in indices:
        low, high = int(index.min()), int(index.max())
        if index.dtype is torch.int64 and len(indices) == 1 and index.numel() <= high - low + 1:
            index.copy_((torch.randperm(high - low + 1, generator=source)[: index.numel()] + low).view(index.shape))


def _slots(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict) and "slot" in tree:
        yield tree["slot"]
    elif isinstance(tree, dict):
        yield from _slots(tree.get("value"))
    elif isinstance(tree, list):
        for part in tree:
            yield from _slots(part)


def _mask(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """An attention mask must not mask a whole row."""
    mask = _given(call, tensors, 3, "attn_mask")
    if mask is not None and mask.dtype is torch.bool and mask.ndim:
        mask.select(-1, 0).fill_(True)


def _lengths(call: Call, tensors: Tensors, source: torch.Generator) -> None:
    """Lengths of sequences, longest first; the longest is the full length."""
    lengths, data = _given(call, tensors, 1, "lengths"), _given(call, tensors, 0, "input")
    if lengths is not None and data is not None:
        lengths.clamp_(min=1).copy_(lengths.sort(descending=True).values)
        first = _number(call, 2, "batch_first", False)
        lengths[0] = data.shape[1 if first else 0]


_CONSTRAINTS: dict[str, Constraint] = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "nll_loss_nd", "cross_entropy_loss"), _classes),
    "searchsorted": _sorted(0, "sorted_sequence"),
    "bucketize": _sorted(1, "boundaries"),
    "embedding_bag": _offsets,
    **dict.fromkeys(("cholesky", "cholesky_ex", "cholesky_inverse"), _positive_definite),
    **dict.fromkeys(("scatter", "index_copy"), _written_once),
    **dict.fromkeys(("index_put", "__setitem__", "setitem"), _stored_once),
    "scaled_dot_product_attention": _mask,
    "_pack_padded_sequence": _lengths,
}


Data = Literal["random", "real"]

_EXTREME = 1e30
"""A larger range belongs to a mask: use only its ends."""
_LARGEST_BYTES = 8 << 30
_UNKNOWN = Summary(1.0, -1.0, 0.0, 1.0)


def make_inputs(call: StoredCall, data: Data) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward call by slot, on the CPU, in their own dtype. Raises CannotReplay if one cannot be made."""
    made = {}
    for slot in call.slots:
        if slot.side != "output":
            key = f"{call.name}:{slot.name}"
            made[slot.name] = real(slot) if data == "real" and slot.skipped is None else draw(slot.model, key)
    if data == "random":
        constrain(call.model, made, generator(call.name))
    return made


def all_recorded(call: StoredCall) -> bool:
    """Return whether the values of every input were recorded."""
    return all(slot.has_data or slot.skipped is not None for slot in call.slots if slot.side != "output")


def real(slot: StoredSlot) -> torch.Tensor:
    """Return the recorded values with the recorded strides. Do not write to them: they may be the memory of the file."""
    try:
        found = slot.tensor()
    except (NoData, RunError) as error:
        raise CannotReplay(f"{slot.name}: {str(error).splitlines()[0]}") from None
    wanted = slot.stride
    if wanted is None or found.stride() == tuple(wanted) or not _fits(slot.model, found.dtype):
        return found
    return laid_out(found, wanted)


def generator(key: str) -> torch.Generator:
    """Return a random generator that depends on the key alone."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)


def draw(slot: Slot, key: str) -> torch.Tensor:
    """Return a random tensor, uniform between the recorded minimum and maximum, which are its first and last elements."""
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype) or slot.unrecorded not in (None, Unrecorded.WRITTEN_ONLY):
        raise CannotReplay(f"{slot.name}: {slot.skipped or slot.dtype}")
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
    """A fully masked row has no right answer: some devices return NaN, others zero."""
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
        ends = torch.tensor([low, high], dtype=torch.float64)
        flat = torch.where(torch.rand(count, generator=source) < 0.5, *ends)
    else:
        flat = torch.rand(count, generator=source, dtype=torch.float64) * (high - low) + low
    if count:
        flat[0], flat[-1] = low, high
    flat = flat.to(dtype)
    return _with_infinities(flat, summary, source) if summary.inf and dtype.is_floating_point else flat


def _range(summary: Summary, dtype: torch.dtype, count: int) -> tuple[float, float]:
    """Return the recorded range in that dtype.

    A tensor of one value throughout (the weight of a norm before its first update) is given a range that begins there:
    with equal values, a kernel that picks the wrong one would not show.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    low, high = (
        float(figure) if math.isfinite(float(figure)) else otherwise if floating else 0.0
        for figure, otherwise in ((summary.min, -1.0), (summary.max, 1.0))
    )
    most = torch.finfo(dtype).max if floating else 1.0 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**62)
    low, high = (min(max(figure, -most), most) for figure in (low, high))  # a file may claim what the dtype cannot hold
    low, high = min(low, high), max(low, high)
    if floating and low == high and count > 1 and abs(low) < _EXTREME and not summary.inf:
        wider = math.copysign(0.5 * max(abs(low), 1.0), low)
        low, high = min(low, low + wider), max(low, low + wider)
    return low, high


def _with_infinities(flat: torch.Tensor, summary: Summary, source: torch.Generator) -> torch.Tensor:
    """Put about as many -inf as were recorded, as in a mask, but never everywhere."""
    infinite = [value for value in (float(summary.max), float(summary.min)) if math.isinf(value)]
    chosen = torch.rand(flat.numel(), generator=source) < min(0.5, summary.inf / max(flat.numel(), 1))
    if infinite and chosen.any() and not chosen.all():
        flat[chosen] = infinite[-1]
    return flat

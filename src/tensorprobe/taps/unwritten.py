"""Memory that was allocated without being initialised, and which of its elements were written since.

Its contents are undefined: two executions of one program find different bytes there. In the record its unwritten
elements are zero, the slot lists the written ones, and a tensor without any written element has no values at all.

Writes are followed by storage. A call that fills its argument (`copy_`, `out=`, a collective) writes all of that view; a call that
fills a part (`__setitem__`, `scatter_`) is repeated on a mask. A call that only reads is computed again, with two different
fillings of what nobody wrote: the elements of the result that differ are unwritten too. Memory that changes without a visible
call (numpy, a kernel of another library) counts as written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_result
from tensorprobe.model.event import SlotEvent
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.reason import Unrecorded
from tensorprobe.ops import Trait, has, is_collective
from tensorprobe.ops.table import short_name

_SAMPLES = 4096
_MOST_ELEMENTS = 1 << 28
"""Larger memory has no mask: the first write counts for all of it."""
_MOST_RANGES = 1024
_SWEEP = 64
_FAMILIES = ("Tensor.", "Torch.", "Functional.", "Aten.")

_FILLING = frozenset(
    """copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ eye_ _foreach_copy_
    _foreach_zero_ set_data""".split()
)


class _Block(msgspec.Struct):
    """One storage. `mask` has an element for each of `itemsize` bytes, true where something was written; None: nowhere."""

    life: Any
    nbytes: int
    itemsize: int
    sample: torch.Tensor
    mask: torch.Tensor | None = None
    under_way: bool = False
    """Whether a collective is writing here. Until it is waited for, nothing that is read here means anything."""


class Unwritten:
    """The storages of one session that are not fully written. `blocks` is empty for most programs, most of the time."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.blocks: dict[int, _Block] = {}
        self._note = note
        self._lock = threading.RLock()
        self._sweep_at = _SWEEP

    def take(self, take: Any, tensors: Tensors, but: tuple[str, ...], reason: str) -> list[Any]:
        """Take tensors for a sink, those with unwritten elements as described above."""
        shown: Tensors = []
        fresh: Tensors = []
        masks: dict[str, torch.Tensor] = {}
        with self._lock, torch_names.quiet():
            for name, tensor in tensors:
                mask = None if but and name.startswith(but) else self._mask_of(tensor)
                if mask is None:
                    shown.append((name, tensor))
                elif not mask.any():
                    fresh.append((name, tensor))
                else:
                    masks[name] = mask
                    shown.append((name, _filled(torch_names.local_part(tensor), mask, 0)))
        if not fresh and not masks:
            return list(take(tensors, but=but, reason=reason))
        slots: list[Any] = take(shown, but=but, reason=reason)
        for slot in slots:
            if isinstance(slot, SlotEvent) and slot.name in masks:
                slot.written = _ranges(masks[slot.name])
        if fresh:
            places = {name: place for place, (name, _) in enumerate(tensors)}
            slots = [*slots, *take(fresh, but=("",), reason=Unrecorded.UNINITIALISED.value)]
            slots.sort(key=lambda slot: places[slot.name])
        return slots

    def allocated(self, outputs: Tensors, workspace: str = "") -> None:
        """Remember uninitialised memory: the outputs whose slots begin like this. The others are written."""
        with self._lock, torch_names.quiet():
            for slot, tensor in outputs:
                if slot.startswith(workspace):
                    self._add(tensor, None)
        self.filled([entry for entry in outputs if not entry[0].startswith(workspace)])

    def grown(self, storage: Any) -> None:
        """Note that a storage has new memory."""
        with self._lock, torch_names.quiet():
            self.blocks.pop(storage._cdata, None)
            if storage.nbytes():
                self._add(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), None)

    def under_way(self, tensors: Tensors) -> None:
        """Note that a collective is going to write these tensors."""
        with self._lock, torch_names.quiet():
            for _, tensor in tensors:
                key = _key(tensor)
                if key is not None:
                    self.blocks.pop(key, None)
                    self._add(tensor, None)
                    if key in self.blocks:
                        self.blocks[key].under_way = True

    def filled(self, tensors: Tensors) -> None:
        """Mark all elements of these tensors as written."""
        with self._lock, torch_names.quiet():
            for _, tensor in tensors:
                self._mark(tensor, lambda mask: mask.fill_(True))

    def follow(
        self, op: str, func: Any, args: Any, kwargs: Any, *, inputs: Tensors, outputs: Tensors, out: tuple[str, ...]
    ) -> None:
        """Find out what a call has written. `out` are the beginnings of the slots that it fills."""
        touched = [(slot, tensor) for slot, tensor in inputs if _key(tensor) in self.blocks]
        if not touched:
            return
        base = short_name(op)
        received = [entry for entry in touched if out and entry[0].startswith(out)]
        if received:
            self.filled(received)
        if "all_gather_copy_in" in op:  # of FSDP: the first result is the part of the buffer that it fills
            self.filled(outputs[:1])
        elif is_collective(op):
            self.filled(touched)
        elif base in _FILLING or ".init." in op:
            source = args[1] if base == "copy_" and len(args) > 1 else None
            self._fill(touched, source)
        elif has(op, Trait.WRITES_PART) or base in _PARTS:
            self._fill_part(base, args, kwargs)
        elif op.startswith(_FAMILIES) and base.endswith("_") and not base.startswith("__"):
            self._resample(touched)
        elif not received and op.startswith(_FAMILIES) and not has(op, Trait.RANDOM):
            self._read(func, args, kwargs, touched, outputs)

    def clear(self) -> None:
        """Forget everything: writes are no longer followed."""
        with self._lock:
            self.blocks.clear()

    def _add(self, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        key, tensor = _key(tensor), torch_names.local_part(tensor)
        if key is None or key in self.blocks or type(tensor.numel()) is not int or not tensor.numel():
            return  # a symbolic number has no memory, and to ask whether it is 0 would make it a plain one
        if len(self.blocks) >= self._sweep_at:
            self.blocks = {key: block for key, block in self.blocks.items() if not block.life.expired()}
            self._sweep_at = max(_SWEEP, 2 * len(self.blocks))
        storage = tensor.untyped_storage()
        if not storage.data_ptr():
            return
        block = _Block(torch_names.StorageWeakRef(storage), storage.nbytes(), tensor.itemsize, _sample(storage))
        self.blocks[key] = block
        if mask is not None:
            block.mask = torch.zeros(block.nbytes // block.itemsize, dtype=torch.bool)
            _view(block.mask, tensor).copy_(mask)

    def _mask_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return which elements of a tensor are written; None when all are."""
        key, tensor = _key(tensor), torch_names.local_part(tensor)
        block = None if key is None else self.blocks.get(key)
        if key is None or block is None:
            return None
        if block.under_way:
            return torch.zeros(tensor.shape, dtype=torch.bool)
        storage = tensor.untyped_storage()
        if not _fits(block, tensor) or not _is_untouched(block, storage):
            del self.blocks[key]
            return None
        if block.mask is None:
            return torch.zeros(tensor.shape, dtype=torch.bool)
        if block.mask.all():
            del self.blocks[key]
            return None
        mask = _view(block.mask, tensor)
        return None if mask.all() else mask

    def _mark(self, tensor: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> None:
        """Let `write` mark the elements of a tensor that were written."""
        key, tensor = _key(tensor), torch_names.local_part(tensor)
        block = None if key is None else self.blocks.get(key)
        if key is None or block is None:
            return
        if not _fits(block, tensor) or (count := block.nbytes // block.itemsize) > _MOST_ELEMENTS:
            del self.blocks[key]
            return
        block.under_way = False
        if block.mask is None:
            block.mask = torch.zeros(count, dtype=torch.bool)
        write(_view(block.mask, tensor))
        block.sample = _sample(tensor.untyped_storage())
        if block.mask.all():
            del self.blocks[key]

    def _fill(self, touched: Tensors, source: Any) -> None:
        first = touched[0][0]
        if not first.startswith(("input.0", "input.kwargs")):
            return
        with self._lock, torch_names.quiet():
            holes = self._mask_of(source) if isinstance(source, torch.Tensor) else None
        if holes is not None:
            with self._lock, torch_names.quiet():
                self._mark(touched[0][1], lambda mask: mask.copy_(holes))
        else:
            self.filled([entry for entry in touched if entry[0].startswith(("input.0", "input.kwargs"))])

    def _fill_part(self, base: str, args: Any, kwargs: Any) -> None:
        write = _PARTS.get(base)
        if write is None or not args or not isinstance(args[0], torch.Tensor):
            return
        with self._lock, torch_names.quiet():
            rest = _replaced(args[1:], lambda tensor: tensor.cpu())
            named = _replaced(kwargs, lambda tensor: tensor.cpu())
            self._mark(args[0], lambda mask: write(mask, *rest, **named))

    def _resample(self, touched: Tensors) -> None:
        """Take a new sample after a call changed memory in place: its unwritten elements are still undefined."""
        with self._lock, torch_names.quiet():
            for _, tensor in touched:
                block = self.blocks.get(_key(tensor) or 0)
                if block is not None:
                    block.sample = _sample(torch_names.local_part(tensor).untyped_storage())

    def _read(self, func: Any, args: Any, kwargs: Any, touched: Tensors, outputs: Tensors) -> None:
        """Find the elements of the results that depend on uninitialised memory."""
        with self._lock, torch_names.quiet():
            known = {_key(tensor) for _, tensor in touched}
            made = [(name, tensor) for name, tensor in outputs if _key(tensor) not in known]
            masks = {id(tensor): mask for _, tensor in touched if (mask := self._mask_of(tensor)) is not None}
            if not made or not masks:
                return
            results: list[dict[str, torch.Tensor]] = []
            for fill in (0, 1):

                def other(tensor: torch.Tensor, fill: int = fill) -> torch.Tensor:
                    mask, tensor = masks.get(id(tensor)), torch_names.local_part(tensor)
                    if type(tensor) not in torch_names.PLAIN_CLASSES:
                        raise TypeError("a wrapper class manages its own memory, which may have no address")
                    value = float("nan") if fill and tensor.is_floating_point() else fill
                    return tensor.detach() if mask is None else _filled(tensor, mask, value)

                found: Tensors = []
                try:
                    with torch.random.fork_rng(devices=[]):
                        flatten_result(func(*_replaced(args, other), **_replaced(kwargs, other)), found)
                except Exception as error:
                    let_through(error)
                    self._note("a call read uninitialised memory and could not be recomputed")
                    return
                results.append(dict(found))
            for name, tensor in made:
                one, two = results[0].get(name), results[1].get(name)
                if (
                    one is not None
                    and two is not None
                    and one.shape == two.shape == torch_names.local_part(tensor).shape
                ):
                    same = (one == two) | ((one != one) & (two != two))
                    if not same.all():
                        self._add(tensor, same.cpu())


def _key(tensor: torch.Tensor) -> int | None:
    """Return the identity of the storage of a tensor; None when it has none, or when a subclass decides what it means."""
    if type(tensor) is not torch.Tensor and type(torch_names.local_part(tensor)) not in torch_names.PLAIN_CLASSES:
        return None
    try:
        return torch_names.storage_key(tensor)
    except RuntimeError as error:  # sparse, nested or fake tensors, and those inside vmap
        let_through(error)
        return None


def _fits(block: _Block, tensor: torch.Tensor) -> bool:
    """Return whether the mask can describe this tensor. Memory that nothing was written to has no size of element yet."""
    if block.mask is None:
        block.itemsize = tensor.itemsize
    return block.itemsize == tensor.itemsize and bool(tensor.untyped_storage().nbytes() == block.nbytes)


def _view(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _filled(tensor: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy with this value where nothing was written."""
    copy = tensor.detach().clone().masked_fill_(~mask.to(tensor.device), value)
    return copy.requires_grad_(tensor.requires_grad)


def _bytes_of(storage: Any) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat[:: max(1, storage.nbytes() // _SAMPLES)]


def _sample(storage: Any) -> torch.Tensor:
    return _bytes_of(storage).clone()


def _is_untouched(block: _Block, storage: Any) -> bool:
    """Return whether no unwritten byte has changed since the last call that is known to write here, as far as the sample shows."""
    if not storage.data_ptr():
        return False
    now = _bytes_of(storage)
    if block.mask is None:
        return bool(torch.equal(now, block.sample))
    every = max(1, block.nbytes // _SAMPLES)
    places = (torch.arange(0, block.nbytes, every) // block.itemsize)[: len(now)].clamp_(max=len(block.mask) - 1)
    return bool((block.mask[places] | (now == block.sample).cpu()).all())


def _ranges(mask: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return where the written elements begin and end, in row-major order; nothing when there are too many pieces."""
    flat = torch.nn.functional.pad(mask.reshape(-1).to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
    return pairs if len(pairs) <= _MOST_RANGES else ()


def _replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(entry, change) for entry in value)
    if type(value) is dict:
        return {key: _replaced(entry, change) for key, entry in value.items()}
    return value


def _set_item(mask: torch.Tensor, index: Any, value: Any = None) -> None:
    mask[index] = True


def _index_put(mask: torch.Tensor, indices: Any, values: Any = None, accumulate: bool = False, *_: Any) -> None:
    if not accumulate:
        mask[tuple(slice(None) if index is None else index for index in indices)] = True


def _scatter(mask: torch.Tensor, dim: int, index: torch.Tensor, src: Any = None, **options: Any) -> None:
    if not options.get("reduce"):
        mask.scatter_(dim, index, True)


def _index_fill(mask: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, **__: Any) -> None:
    mask.index_fill_(dim, index.long(), True)


def _masked(mask: torch.Tensor, where: torch.Tensor, *_: Any, **__: Any) -> None:
    mask |= where


def _put(mask: torch.Tensor, index: torch.Tensor, source: Any, accumulate: bool = False) -> None:
    if not accumulate:
        mask.put_(index, torch.ones(index.shape, dtype=torch.bool))


def _diagonal(mask: torch.Tensor, fill_value: Any = None, wrap: bool = False) -> None:
    mask.fill_diagonal_(True, wrap)


_PARTS: dict[str, Callable[..., None]] = {
    "__setitem__": _set_item,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "scatter_": _scatter,
    "index_copy_": _index_fill,
    "index_fill_": _index_fill,
    "masked_fill_": _masked,
    "masked_scatter_": _masked,
    "put_": _put,
    "fill_diagonal_": _diagonal,
}

"""Copies tensors into the ring as they are at this moment, or says why it cannot.

Nothing here keeps a tensor, changes one, or runs code of a tensor subclass. Only torch's own functions are used, with
overrides, gradients and dispatch modes off.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors
from tensorprobe.fast import fast
from tensorprobe.model.dtypes import DTYPES
from tensorprobe.model.event import NO_TOKEN, SlotEvent
from tensorprobe.model.interrupts import let_through
from tensorprobe.numerics.device_summary import device_moments
from tensorprobe.record.elements import is_dense
from tensorprobe.record.writer import BYTES_SEEN, SLOTS_TAKEN, RunWriter
from tensorprobe.torch_names import quiet

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_DTYPES: dict[torch.dtype, tuple[str, int, int, bool]] = {
    getattr(torch, name): (name, dtype.code, dtype.itemsize, dtype.kind in ("float", "complex"))
    for name, dtype in DTYPES.items()
    if hasattr(torch, name)
}


class Snapshots:
    """Takes tensors for one sink. `mode` and `floating_only` decide how much of each is kept. What is left out is counted."""

    def __init__(self, writer: RunWriter, *, mode: str, floating_only: bool) -> None:
        self._writer = writer
        self._put = writer.put
        self.context: Any = None
        """For C: what copying plain tensors needs to know."""
        if fast is not None and mode != "structure" and not floating_only:
            ring, size, largest = writer.ring
            state = writer.state.buffer_info()[0]
            self.context = fast.context(_Tensor, _Parameter, _DTYPES, SlotEvent, writer, ring, size, state, largest)
        self._structure = mode == "structure"
        self._summary_only = mode == "summary"
        self._floating_only = floating_only
        self._devices: dict[torch.device, str] = {}
        self.skipped: Counter[str] = Counter()

    @property
    def slots(self) -> int:
        """How many tensors were taken."""
        return self._writer.state[SLOTS_TAKEN]

    @property
    def bytes_seen(self) -> int:
        """The number of bytes of values that were read."""
        return self._writer.state[BYTES_SEEN]

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[SlotEvent]:
        """Return a slot for each tensor. Those whose names begin with one of `but` have no values, for the given reason.

        Call it with overrides off. It never fails: what cannot be read is skipped. This is the hottest loop of capture.
        """
        if not tensors:
            return []
        if self.context is not None and not but:
            with self._writer.lock:
                slots: list[SlotEvent] = fast.take(self.context, tensors)  # type: ignore[union-attr]
            if not all(slots):
                with_care = iter(
                    self._take_with_care(
                        [t for t, slot in zip(tensors, slots, strict=True) if slot is None], but, reason
                    )
                )
                slots = [next(with_care) if slot is None else slot for slot in slots]
        else:
            slots = self._take_with_care(tensors, but, reason)
        self._writer.state[SLOTS_TAKEN] += len(slots)
        return slots

    def tokens(self, slots: list[SlotEvent]) -> list[int]:
        """Return the tokens of the bytes that were copied for these slots."""
        return [slot.token for slot in slots if slot.token != NO_TOKEN]

    def _take_with_care(self, tensors: Tensors, but: tuple[str, ...], reason: str) -> list[SlotEvent]:
        slots: list[SlotEvent] = []
        copies: list[tuple[int, int, int]] = []
        kept: list[torch.Tensor] = []
        places: list[int] = []
        for name, tensor in tensors:
            try:
                slot, copy = self._take_one(name, tensor, but, reason)
                if copy is not None:
                    places.append(len(slots))
                    copies.append((torch_names.address_of(copy), copy.nbytes, _DTYPES[copy.dtype][1]))
                    kept.append(copy)
                slots.append(slot)
            except (
                Exception
            ) as error:  # tensors inside vmap, fake storages, subclasses of libraries nobody here has met
                let_through(error)
                if type(tensor) is _Tensor and isinstance(error, (AttributeError, TypeError)):
                    raise  # a bug of ours, or a name that this torch lacks: the call counts as failed
                why = (
                    _why_not(tensor)
                    if torch_names.layout_of(tensor) is not torch.strided
                    else f"cannot be read ({type(error).__name__})"
                )
                slots.append(self._skip(name, tensor, why))
        if copies:
            token = self._put(copies)
            for place in places:
                slots[place].token = token
                token += 1
        return slots

    def _take_one(
        self, name: str, tensor: torch.Tensor, but: tuple[str, ...], reason: str
    ) -> tuple[SlotEvent, torch.Tensor | None]:
        """Return the slot of any tensor and, if bytes are to be copied, a plain tensor on the host that holds them in one block."""
        if but and name.startswith(but):
            return self._skip(name, tensor, reason), None
        grad = torch_names.requires_grad_of(tensor)
        if type(tensor) is not _Tensor and type(tensor) is not _Parameter:
            found = plain(tensor)
            if isinstance(found, str):
                return self._skip(name, tensor, found), None
            tensor = found
        known = _DTYPES.get(tensor.dtype)
        if known is None or tensor.layout is not torch.strided or tensor.is_nested:
            return self._skip(name, tensor, _why_not(tensor)), None
        if tensor.is_meta:
            return self._skip(name, tensor, "meta tensor, has no values"), None
        if tensor.is_cpu and tensor.numel() and not _has_memory(tensor) and not tensor._is_zerotensor():
            return self._skip(name, tensor, "has no memory of its own"), None
        dtype, _, _, floating = known
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        slot = SlotEvent(name, dtype, tuple(tensor.shape), self._device(tensor.device), stride, grad)
        if self._structure or (self._floating_only and not floating):
            return slot, None
        with self._writer.lock:
            self._writer.state[BYTES_SEEN] += tensor.nbytes
        if self._summary_only and not tensor.is_cpu:
            with quiet():
                slot.summary = device_moments(tensor.detach())
            return slot, None
        return slot, _one_block(tensor, stride)

    def _device(self, device: torch.device) -> str:
        name = self._devices.get(device)
        if name is None:
            name = self._devices[device] = sys.intern(str(device))
        return name

    def _skip(self, name: str, tensor: torch.Tensor, reason: str) -> SlotEvent:
        self.skipped[reason] += 1
        shape: tuple[int, ...] = ()
        try:
            shape = tuple(map(_number_of, torch_names.shape_of(tensor)))
        except Exception as error:  # a nested or symbolic tensor has no shape of plain numbers: () then
            let_through(error)
        dtype = str(torch_names.dtype_of(tensor)).removeprefix("torch.")
        device, grad = self._device(torch_names.device_of(tensor)), torch_names.requires_grad_of(tensor)
        return SlotEvent(name, dtype, shape, device, None, grad, skipped=reason)


def _number_of(size: Any) -> int:
    """Return a size as a number. `int` would make a symbolic one that number in everything that the program traces."""
    if type(size) is int:
        return size
    if not size.node.has_hint():
        raise TypeError("a size that no number is known of")
    return int(size.node.hint)


def _one_block(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """Return the values on the host in one block of memory: the block that the strides permute, else row-major order."""
    dense = stride is None or is_dense(tensor.shape, stride)
    if dense and tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj() and _has_memory(tensor):
        return tensor
    with quiet():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if not dense or stride is None:
            return tensor.clone(memory_format=torch.contiguous_format)
        return torch.empty_strided(tuple(tensor.shape), stride, dtype=tensor.dtype).copy_(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has memory. If not, its address is only the offset, and reading there would crash the process."""
    return bool(torch_names.address_of(tensor) != tensor.storage_offset() * tensor.itemsize)


def plain(tensor: torch.Tensor) -> torch.Tensor | str:
    """Return the plain tensor inside a subclass, or why there is none. Of a DTensor it is the local part: statistics are collectives."""
    kind = type(tensor)
    if hasattr(kind, "_local_tensor"):
        local = tensor._local_tensor
        return local.trigger_wait() if hasattr(type(local), "trigger_wait") else local
    if kind.__name__ == "AsyncCollectiveTensor":
        return "collective still running"
    if kind.__name__ in ("FakeTensor", "FunctionalTensor") or torch_names.is_functional_tensor(tensor):
        return f"{kind.__name__}, has no values"
    if torch_names.is_nested(tensor):
        return "nested tensor"
    if hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not _Tensor.__torch_dispatch__:
        return f"tensor subclass {kind.__name__}"
    with quiet():
        return torch_names.methods_of_tensor.as_subclass(tensor, _Tensor)


def _why_not(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized:
        return "quantized tensor"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.').replace('_', ' ')} tensor"
    return f"dtype {str(tensor.dtype).removeprefix('torch.')}"

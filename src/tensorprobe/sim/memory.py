"""Memory of the simulated device: host memory under a second name.

A device tensor is a native PrivateUse1 tensor whose storage points into host memory that a CPU tensor owns.
`to_device` makes one from a CPU tensor, `to_host` gives a CPU tensor over the memory of a device tensor; neither
copies. Both go through a DLPack capsule whose device field is rewritten between export and import: torch then builds
a tensor of the named device around the pointer and keeps the source alive.

Promises: nothing here dispatches to the simulated device's own kernels, so it is safe to call from inside them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorprobe import torch_names
from tensorprobe.sim import cards

aten = torch.ops.aten

_DLPACK_CPU = 1
_DLPACK_EXTENSION = 12  # what torch maps to PrivateUse1
CPU_KEYS = torch_names.DispatchKeySet(torch_names.DispatchKey.CPU)


class _DlDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]


class _DlTensorHead(ctypes.Structure):
    """The first two fields of DLTensor; the rest is not touched."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _DlDevice)]


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _relabelled(tensor: torch.Tensor, device_code: int) -> torch.Tensor:
    """Return a tensor on the same memory, labelled with the device of that DLPack code and the current card."""
    capsule = torch_names.to_dlpack(tensor)
    head = _DlTensorHead.from_address(_capsule_pointer(capsule, b"dltensor"))
    head.device.type = device_code
    head.device.index = cards.current() if device_code == _DLPACK_EXTENSION else 0
    return torch_names.from_dlpack(capsule)


def is_device(tensor: torch.Tensor) -> bool:
    """Return whether the tensor lives on the simulated device."""
    return not tensor.is_cpu and tensor.device.type == torch_names.extra_device()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory; tensors of other devices are returned unchanged."""
    if not is_device(tensor):
        return tensor
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"the simulated device has no {tensor.layout} tensors; use a dense tensor")
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    # Lazy conjugation and negation are bits of the tensor that DLPack refuses: take them off, alias, put them back.
    if tensor.is_conj():
        return to_host(aten._conj.default.redispatch(CPU_KEYS, tensor)).conj()
    if tensor.is_neg():
        return aten._neg_view.default(to_host(aten._neg_view.default.redispatch(CPU_KEYS, tensor)))
    return _relabelled(tensor, _DLPACK_CPU)


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a device tensor on the memory of a CPU tensor, which it keeps alive; return other tensors unchanged."""
    if not tensor.is_cpu:
        return tensor
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"the simulated device has no {tensor.layout} tensors; keep this op on the CPU")
    if tensor.is_quantized:
        raise NotImplementedError("the simulated device has no quantized tensors; keep this op on the CPU")
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return _relabelled(tensor.resolve_conj().resolve_neg(), _DLPACK_EXTENSION)


def view_of(source: torch.Tensor, geometry: torch.Tensor) -> torch.Tensor:
    """Return a device view on `source`'s storage with the shape that a CPU view of its alias has."""
    if geometry.dtype != source.dtype:
        return to_device(geometry)
    offset = source.storage_offset() + geometry.storage_offset()
    size, stride = list(geometry.size()), list(geometry.stride())
    return aten.as_strided.default.redispatch(CPU_KEYS, source, size, stride, offset)


def adopt(tensor: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    """Make a device tensor point to the memory and shape of another device tensor, in place."""
    return aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS,
        tensor,
        replacement.untyped_storage(),
        replacement.storage_offset(),
        list(replacement.size()),
        list(replacement.stride()),
    )


def resize(tensor: torch.Tensor, size: list[int]) -> torch.Tensor:
    """`tensor.resize_(size)` for a device tensor: inside its storage where it fits, else in new memory with the old
    elements.
    """
    strides = [math.prod(max(extent, 1) for extent in size[i + 1 :]) for i in range(len(size))]
    needed_bytes = (math.prod(size) + tensor.storage_offset()) * tensor.element_size()
    storage = tensor.untyped_storage()
    if needed_bytes <= storage.nbytes():
        offset = tensor.storage_offset()
        return aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, tensor, storage, offset, size, strides)
    grown = torch.empty(size, dtype=tensor.dtype)
    kept = min(grown.numel(), tensor.numel())
    if kept:
        grown.view(-1)[:kept].copy_(to_host(tensor).reshape(-1)[:kept])
    return adopt(tensor, to_device(grown))


def _storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a CPU uint8 tensor over the bytes of a device storage."""
    if not storage.nbytes():
        return torch.empty(0, dtype=torch.uint8)
    with cards.on(storage.device.index):
        empty = to_device(torch.empty(0, dtype=torch.uint8))
    whole = aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, empty, storage, 0, [storage.nbytes()], [1])
    return to_host(whole)


def _device_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a CPU storage in device memory."""
    return to_device(torch.empty(0, dtype=torch.uint8).set_(storage).clone()).untyped_storage()


def install_storage_methods(name: str) -> None:
    """Teach `torch.UntypedStorage` to copy, move and refuse for device `name`.

    No C++ allocator exists for the device, so the stock methods would follow a null pointer. These replacements carry
    saving, loading, deepcopy and `.to` of storages; making an uninitialised device storage, or resizing one, is
    refused with a message.
    """
    untyped: Any = torch.UntypedStorage
    stock_clone, stock_cpu, stock_to, stock_new = untyped.clone, untyped.cpu, untyped.to, untyped.__new__
    stock_resize = untyped.resize_

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def without_overrides(*args: Any, **kwargs: Any) -> Any:
            with torch_names.no_overrides(), torch_names.below_autograd():
                return method(*args, **kwargs)

        return without_overrides

    def clone(self: Any) -> Any:
        if self.device.type != name:
            return stock_clone(self)
        with cards.on(self.device.index):
            return to_device(_storage_bytes(self).clone()).untyped_storage()

    def cpu(self: Any) -> Any:
        return _storage_bytes(self).clone().untyped_storage() if self.device.type == name else stock_cpu(self)

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == name:
            return move(self, device)
        return cpu(self) if self.device.type == name else stock_to(self, device=device, non_blocking=non_blocking)

    def move(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        card = cards.current() if device is None else torch.device(device).index
        card = cards.current() if card is None else card
        if self.device.type == name and self.device.index == card:
            return self
        with cards.on(card):
            return _device_storage(cpu(self) if self.device.type == name else self)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == name:
            host_kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            card = torch.device(device).index
            with cards.on(-1 if card is None else card):
                return _device_storage(stock_new(cls, *args, **host_kwargs))
        return stock_new(cls, *args, **kwargs)

    def resize_(self: Any, size: int) -> Any:
        if self.device.type == name:
            raise NotImplementedError(
                f"the simulated device {name!r} cannot resize a storage in place "
                "(fully_shard / FSDP2 and storage offloading need it); "
                "use DistributedDataParallel, or run them on the CPU"
            )
        return stock_resize(self, size)

    untyped.clone, untyped.cpu, untyped.to = guarded(clone), guarded(cpu), guarded(to)
    setattr(untyped, name, guarded(move))
    untyped.__new__ = staticmethod(new)
    untyped.resize_ = resize_


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return lists, tuples and dicts with each tensor inside changed; everything else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(change, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors inside lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []

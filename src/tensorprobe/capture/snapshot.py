"""A tensor as it is at this moment, handed to the record: its bytes copied, or the reason why not.

Nothing here keeps a tensor, changes one, or runs code of a tensor subclass. The tools are torch's own, with overrides,
gradients and dispatch modes off.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tensorprobe.capture import private
from tensorprobe.capture.flatten import Tensors
from tensorprobe.model.dtypes import DTYPES
from tensorprobe.record.messages import NO_TOKEN
from tensorprobe.record.writer import RunWriter

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_DTYPES: dict[torch.dtype, tuple[str, int, bool]] = {
    getattr(torch, name): (name, dtype.code, dtype.kind in ("float", "complex"))
    for name, dtype in DTYPES.items()
    if hasattr(torch, name)
}

SlotTuple = tuple[Any, ...]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Torch calls inside are seen by nobody and leave no trace in any graph."""
    with private.no_overrides(), torch.no_grad():
        if private.dispatch_modes():
            with _disable_current_modes():
                yield
        else:
            yield


class Snapshots:
    """Takes tensors for one probe. `mode` and `floating_only` decide how much of each; what is left out is counted."""

    def __init__(self, writer: RunWriter, *, mode: str, floating_only: bool) -> None:
        self._writer = writer
        self._put = writer.put
        self._structure = mode == "structure"
        self._floating_only = floating_only
        self._devices: dict[torch.device, str] = {}
        self.slots = 0
        self.bytes_seen = 0
        self.skipped: Counter[str] = Counter()

    def take(self, name: str, tensor: torch.Tensor) -> SlotTuple:
        """The slot of a tensor, ready to be sent. Call it with overrides off. It never fails: what cannot be read is skipped."""
        self.slots += 1
        try:
            return self._take(name, tensor)
        except Exception as error:  # tensors inside vmap, fake storages, subclasses of libraries nobody here has met
            return self._skip(name, tensor, f"cannot be read ({type(error).__name__})")

    def take_all(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[SlotTuple]:
        """The slots of several tensors. Those whose names begin with one of `but` go without values, for the reason given."""
        if not but:
            return [self.take(name, tensor) for name, tensor in tensors]
        return [
            self.leave_out(name, tensor, reason) if name.startswith(but) else self.take(name, tensor)
            for name, tensor in tensors
        ]

    def leave_out(self, name: str, tensor: torch.Tensor, reason: str) -> SlotTuple:
        """The slot of a tensor whose values mean nothing."""
        self.slots += 1
        return self._skip(name, tensor, reason)

    def _take(self, name: str, tensor: torch.Tensor) -> SlotTuple:
        if type(tensor) is not _Tensor and type(tensor) is not _Parameter:
            found = _plain(tensor)
            if isinstance(found, str):
                return self._skip(name, tensor, found)
            tensor = found
        known = _DTYPES.get(tensor.dtype)
        if known is None or tensor.layout is not torch.strided:
            return self._skip(name, tensor, _why_not(tensor))
        dtype, code, floating = known
        shape = tuple(tensor.shape)
        if not tensor.is_cpu:
            return self._take_from_device(name, tensor, dtype, code, floating)
        if self._structure or (self._floating_only and not floating):
            return (name, dtype, shape, "cpu", _stride(tensor), tensor.requires_grad, NO_TOKEN, None)
        nbytes = tensor.nbytes
        self.bytes_seen += nbytes
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            address = tensor.const_data_ptr()
            if address or not nbytes:
                return (name, dtype, shape, "cpu", None, tensor.requires_grad, self._put(address, nbytes, code), None)
        stride = _stride(tensor)
        with quiet():
            token = self._put_copy(tensor, stride, code)
        return (name, dtype, shape, "cpu", stride, tensor.requires_grad, token, None)

    def _put_copy(self, tensor: torch.Tensor, stride: tuple[int, ...] | None, code: int) -> int:
        """A tensor that is not one contiguous block: as the block it permutes, else made contiguous."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if stride is not None and not is_dense(tensor.shape, stride):
            tensor = tensor.contiguous()
        elif stride is None or tuple(tensor.stride()) != stride or not tensor.const_data_ptr():
            tensor = tensor.clone(memory_format=torch.contiguous_format) if stride is None else _strided(tensor, stride)
        return self._put(tensor.const_data_ptr(), tensor.nbytes, code)

    def _take_from_device(self, name: str, tensor: torch.Tensor, dtype: str, code: int, floating: bool) -> SlotTuple:
        device = self._device(tensor.device)
        shape, stride, grad = tuple(tensor.shape), _stride(tensor), tensor.requires_grad
        if tensor.is_meta:
            return self._skip(name, tensor, "meta tensor, has no values")
        if self._structure or (self._floating_only and not floating):
            return (name, dtype, shape, device, stride, grad, NO_TOKEN, None)
        self.bytes_seen += tensor.nbytes
        with quiet():
            host = tensor.detach().cpu()
            token = self._put_copy(host, stride, code)
        return (name, dtype, shape, device, stride, grad, token, None)

    def _device(self, device: torch.device) -> str:
        name = self._devices.get(device)
        if name is None:
            name = self._devices[device] = str(device)
        return name

    def _skip(self, name: str, tensor: torch.Tensor, reason: str) -> SlotTuple:
        self.skipped[reason] += 1
        shape: tuple[int, ...] = ()
        with contextlib.suppress(Exception):  # a nested or symbolic tensor has no shape of plain numbers: () then
            shape = tuple(int(size) for size in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return (name, dtype, shape, str(tensor.device), None, bool(tensor.requires_grad), NO_TOKEN, reason)


def is_dense(shape: Any, stride: Any) -> bool:
    """Whether the strides permute one gap-free block without overlap."""
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _strided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy whose memory has the given dense strides."""
    copy = torch.empty_strided(tuple(tensor.shape), stride, dtype=tensor.dtype)
    return copy.copy_(tensor)


def _stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return None if tensor.is_contiguous() else tuple(tensor.stride())


def _plain(tensor: torch.Tensor) -> torch.Tensor | str:
    """The plain tensor inside a subclass, or why there is none. A statistic of a DTensor would be a collective: take the local part."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, _Tensor):
        wait = getattr(local, "trigger_wait", None)
        return local.trigger_wait() if callable(wait) else local
    kind = type(tensor).__name__
    if kind == "AsyncCollectiveTensor":
        return "collective still under way"
    if kind in ("FakeTensor", "FunctionalTensor") or torch._is_functional_tensor(tensor):
        return f"{kind}, has no values"
    if getattr(tensor, "is_nested", False):
        return "nested tensor"
    if hasattr(type(tensor), "__tensor_flatten__") or type(tensor).__torch_dispatch__ is not _Tensor.__torch_dispatch__:
        return f"tensor subclass {kind}"
    with quiet():
        return tensor.as_subclass(_Tensor)


def _why_not(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized:
        return "quantized tensor"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.').replace('_', ' ')} tensor"
    return f"dtype {str(tensor.dtype).removeprefix('torch.')}"

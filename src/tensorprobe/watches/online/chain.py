"""The reference chain: the numbers that the program would have if every call ran on the reference from the start.

Each storage of the program has a shadow: the same elements in a wide dtype on the CPU. A tensor's shadow is a view of it with the
tensor's sizes and strides, so views and writes through views just work. If numbers of the device come from a call that was not
compared (random ops, other processes, data) or were changed unseen, the shadow is copied from the device again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.replay.evidence import on_host
from tensorprobe.replay.sight import relative_error
from tensorprobe.watches.online.lifting import PRECISIONS, Arguments, OpPlan, lift, lift_tensor
from tensorprobe.watches.online.reference import NoReference, run
from tensorprobe.watches.online.verdict import Case

_WIDER = PRECISIONS["double"]
_SWEEP_AT_LEAST = 256


class Compared(NamedTuple):
    """The relative errors against the chain of the worst output, and of the worst input before the call."""

    accumulated: float
    inherited: float
    slot: str


class _Shadow:
    __slots__ = ("alive", "dtype", "error", "late", "version", "wide")

    def __init__(self, tensor: torch.Tensor, wide: torch.Tensor, error: float) -> None:
        self.alive = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.wide, self.error = tensor.dtype, wide, error
        self.version = _version(tensor)
        self.late = 0
        """1 if a call has just written to it: torch increases the version only after the call."""


class _Lifted(NamedTuple):
    arguments: Arguments
    inherited: float


class Chain:
    """The shadows of a process. Calls must come in execution order."""

    def __init__(self) -> None:
        self._shadows: dict[int, _Shadow] = {}
        self._sweep_at = _SWEEP_AT_LEAST
        self.followed = self.reseeded = 0

    def lift(self, plan: OpPlan, given: Arguments) -> _Lifted:
        """Return the arguments of a call from the chain, and the error of the device's arguments."""
        errors = [0.0]

        def take(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_floating(tensor):
                return lift_tensor(tensor, {}, True)
            shadow = self._of(tensor)
            errors.append(shadow.error)
            return _view(shadow, tensor)

        lifted = lift(plan._replace(received=frozenset()), given, "double", copies=False, fresh=take)
        return _Lifted(lifted, max(errors))

    def follow(self, case: Case, lifted: _Lifted) -> Compared | None:
        """Run the call on the chain, keep its results, and compare the device with them."""
        plan = case.plan
        try:
            outputs = run(case.func, plan, lifted.arguments)
        except NoReference:
            self.forget(case.results.values())
            return None
        worst = Compared(0.0, lifted.inherited, "")
        for slot, wide in outputs.items():
            result = case.results.get(slot)
            if result is None or result.shape != wide.shape or not _is_floating(result):
                continue
            error = _error(wide, result)
            self._keep(plan, result, wide, error)
            if error >= worst.accumulated:
                worst = Compared(error, lifted.inherited, slot)
        self.followed += 1
        return worst

    def pass_by(self, plan: OpPlan, given: Arguments) -> None:
        """Skip a call: forget the tensors that it writes."""
        for at in plan.written:
            self.forget(tensor for _, tensor in Arguments([given[at]], {}).tensors() if tensor.layout is torch.strided)

    def forget(self, tensors: Any) -> None:
        """Forget these tensors: their shadows are copied from the device at the next use."""
        for tensor in tensors:
            self._shadows.pop(_key(tensor), None)

    def look_again(self, tensor: torch.Tensor) -> None:
        """Measure the error of a tensor again after its numbers were replaced."""
        shadow = self._shadows.get(_key(tensor))
        if shadow is not None:
            shadow.error = _error(_view(shadow, tensor), tensor)

    def _of(self, tensor: torch.Tensor) -> _Shadow:
        key = _key(tensor)
        shadow = self._shadows.get(key)
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        if shadow is not None and not shadow.alive.expired() and shadow.dtype is tensor.dtype:
            if 0 <= _version(tensor) - shadow.version <= shadow.late and shadow.wide.numel() == elements:
                return shadow
            self.reseeded += 1
        flat = tensor.as_strided((elements,), (1,), 0)
        shadow = self._shadows[key] = _Shadow(tensor, lift_tensor(flat, _WIDER, True), 0.0)
        self._sweep()
        return shadow

    def _keep(self, plan: OpPlan, result: torch.Tensor, wide: torch.Tensor, error: float) -> None:
        key = _key(result)
        known = self._shadows.get(key)
        if known is not None and not known.alive.expired() and known.dtype is result.dtype:
            # An argument that the call changed or returned: running the call on the chain has updated its shadow.
            known.version, known.late, known.error = _version(result), int(bool(plan.written)), error
            return
        wide = wide.to(_WIDER[result.dtype])  # `torch.ones(3)` has no dtype argument to widen
        elements = result.untyped_storage().nbytes() // result.itemsize
        if elements == wide.numel() and result.is_contiguous() and wide.is_contiguous():
            flat = wide.reshape(-1)
        else:
            flat = torch.zeros(elements, dtype=wide.dtype)
            flat.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(wide)
        self._shadows[key] = _Shadow(result, flat, error)
        self._sweep()

    def _sweep(self) -> None:
        """Drop the shadows of storages that no longer exist."""
        if len(self._shadows) >= self._sweep_at:
            self._shadows = {key: one for key, one in self._shadows.items() if not one.alive.expired()}
            self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._shadows))


def _error(wide: torch.Tensor, result: torch.Tensor) -> float:
    return relative_error(on_host(wide), on_host(result))


def _view(shadow: _Shadow, tensor: torch.Tensor) -> torch.Tensor:
    return shadow.wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _WIDER

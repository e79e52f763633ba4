"""One boxed kernel for every op of the simulated device: run the same op on CPU aliases of its tensors.

A `HostPlan` is made once for each op from its schema: whether it is a view, which returned tensor is which argument, whether
it draws random numbers. Running it is simple: alias the tensors, run the op through the faults, alias the results back. Ops
that change the memory of a tensor have code of their own. `FLAG` is the overflow flag of the older tools' accelerators.

Promises: user modes and autocast do not see the execution on the host. The host's random stream is not touched. Endless
recursion between a C++ kernel and this one raises RuntimeError instead of crashing the process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorprobe import torch_names
from tensorprobe.sim import cards, faults, memory
from tensorprobe.sim.host_ops import SPECIALS, HostPlan, make_plan
from tensorprobe.sim.kinds import OpCall
from tensorprobe.sim.memory import map_tensors, tensors_in

Observer = Callable[[str, Sequence[Tensor]], None]

OBSERVERS: list[Observer] = []
"""Called on the device after each op that computes, with its name and output tensors. Views are not reported."""
GENERATOR = torch.Generator()
"""The random stream of the device."""

_HOST = torch.device("cpu")
_DEPTH_LIMIT = 60
_depth = threading.local()
_random_lock = threading.RLock()
_AUTOCAST_KEYS = torch_names.DispatchKeySet(torch_names.DispatchKey.AutocastCPU) | torch_names.DispatchKeySet(
    torch_names.DispatchKey.AutocastPrivateUse1
)
_plans: dict[Any, HostPlan] = {}


def run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the device's kernel for `op`."""
    depth = getattr(_depth, "value", 0)
    if depth > _DEPTH_LIMIT:
        raise RuntimeError(f"the simulated device cannot run {op}: its kernel calls itself without end")
    _depth.value = depth + 1
    before = -1
    try:
        with (
            torch_names.no_overrides(),
            torch_names.below_autograd(),
            torch_names.without_keys(_AUTOCAST_KEYS),
        ):
            before = cards.exchange(_card_of(args, kwargs))
            plan = _plans.get(op)
            if plan is None:
                plan = _plans[op] = make_plan(op)
            if plan.metadata_only:
                return op.redispatch(memory.CPU_KEYS, *args, **kwargs)
            own = _OWN.get(plan.name)
            return own(op, args, kwargs) if own else _run_on_host(plan, op, args, kwargs)
    finally:
        cards.exchange(before)
        _depth.value = depth


def _run_on_host(plan: HostPlan, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    host_args = tuple([_hosted(value) for value in args])
    host_kwargs = {key: _hosted(value) for key, value in kwargs.items()}
    for position in plan.numbers:
        if position < len(args) and isinstance(args[position], (bool, int, float, complex)):
            number = torch.tensor(args[position])
            host_args = (*host_args[:position], number, *host_args[position + 1 :])
    if plan.strict:
        _refuse_mixed_devices(plan, args, kwargs)
    if plan.takes_device:
        host_kwargs["device"] = _HOST
        if host_kwargs.pop("pin_memory", None):
            _refuse_pinning(op, args, kwargs)
    operation = SPECIALS.get(plan.name, op)
    if plan.outputs:
        operation = _resizing(operation, plan.outputs)
    if plan.written:
        operation = _returning_written(operation, plan.written)
    call = OpCall(plan.name, operation, host_args, host_kwargs, outputs=plan.outputs)
    finite = FLAG.armed and plan.computes and all_finite(call.inputs())
    result = _perform(plan, call)
    FLAG.watch(finite, result)
    if plan.view:
        return map_tensors(lambda out: memory.view_of(args[0], out), result)
    if plan.written:
        return _store_written(plan, args, host_args, result)
    dressed = _dress(plan, args, kwargs, host_args, host_kwargs, result)
    for observer in OBSERVERS:
        observer(plan.name, tensors_in(dressed))
    return dressed


def _perform(plan: HostPlan, call: OpCall) -> Any:
    if not plan.random:
        return faults.perform(call, lambda: _first_dtype(call.args))
    if plan.takes_generator:
        if call.kwargs.get("generator") is None and not any(isinstance(value, torch.Generator) for value in call.args):
            call.kwargs["generator"] = GENERATOR
        return faults.perform(call, lambda: _first_dtype(call.args))
    with _random_lock:  # the op draws from the host's stream and takes no other: lend it the device's
        host_state = torch.get_rng_state()
        torch.set_rng_state(GENERATOR.get_state())
        try:
            return faults.perform(call, lambda: _first_dtype(call.args))
        finally:
            GENERATOR.set_state(torch.get_rng_state())
            torch.set_rng_state(host_state)


def _resizing(operation: Callable[..., Any], outputs: frozenset[str]) -> Callable[..., Any]:
    """Wrap the operation: if it must grow an output, it runs again with copies, because an alias cannot grow."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return operation(*args, **kwargs)
        except RuntimeError as refused:
            if "resizable" not in str(refused):
                raise
        return operation(*args, **{key: value.clone() if key in outputs else value for key, value in kwargs.items()})

    return run


def _returning_written(operation: Callable[..., Any], written: tuple[int, ...]) -> Callable[..., Any]:
    """Wrap the operation: it returns the arguments that it writes to, so that a fault can change them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        operation(*args, **kwargs)
        return [args[position] for position in written if position < len(args)]

    return run


def _store_written(plan: HostPlan, args: tuple[Any, ...], host_args: tuple[Any, ...], result: list[Any]) -> None:
    positions = [position for position in plan.written if position < len(args)]
    for position, values in zip(positions, result, strict=True):
        for host, value in zip(tensors_in(host_args[position]), tensors_in(values), strict=True):
            if value is not host:
                host.copy_(value)
    for observer in OBSERVERS:
        observer(plan.name, [tensor for position in positions for tensor in tensors_in(args[position])])


def _dress(
    plan: HostPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    host_args: tuple[Any, ...],
    host_kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """Return the host's result as device tensors; returns that are arguments become those very arguments, holding the
    result.
    """
    if not plan.mutated:
        return None
    single = len(plan.mutated) == 1
    results = [result] if single else list(result)
    dressed = []
    for returned, value in zip(plan.mutated, results, strict=False):
        if returned is None:
            dressed.append(map_tensors(memory.to_device, value))
            continue
        position, name = returned
        original = args[position] if position < len(args) else kwargs.get(name)
        host = host_args[position] if position < len(args) else host_kwargs.get(name)
        if isinstance(original, Tensor) and memory.is_device(original):
            _store(original, host, value)
        dressed.append(original)
    return dressed[0] if single else tuple(dressed)


def _store(original: Tensor, host: Any, value: Tensor) -> None:
    """Make the device tensor `original` hold `value`, which is its own alias `host` unless an op resized or a fault
    replaced it.
    """
    if value is not host and value.shape == host.shape:
        host.copy_(value)
    elif value is not host:
        host = value
    if original.shape != host.shape or (host.numel() and host.data_ptr() != original.data_ptr()):
        memory.adopt(original, memory.to_device(host))


def _copy_from(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy on the device, and to and from the host; the only op that gets lazily conjugated tensors.

    Faults know the three apart: a tool that reads results off the device must not move the count of the program's own
    copies.
    """
    source, target = args[0], args[1]
    name = "sim::to_host" if target.is_cpu else "sim::to_device" if source.is_cpu else "aten::_copy_from"
    host_target = _hosted(target)

    def copy(value: Tensor) -> Tensor:
        return host_target.copy_(value)

    call = OpCall(name, copy, (_hosted(source),), {})
    result = faults.perform(call, lambda: _first_dtype(call.args))
    if result is not host_target:
        host_target.copy_(result)
    for observer in OBSERVERS:
        observer(name, [target])
    return target


def _copy_from_and_resize(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].shape != args[1].shape:
        memory.resize(args[1], list(args[0].shape))
    return _copy_from(op, args, kwargs)


def _resize(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return memory.resize(args[0], list(args[1]))


def _refuse_pinning(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError("the simulated device has no pinned memory; leave out pin_memory")


_OWN: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::resize_": _resize,
    "aten::_pin_memory": _refuse_pinning,
}


def _hosted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return memory.to_host(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_hosted(item) for item in value])
    if isinstance(value, torch.device):
        return _host_for(value)
    return value


def _host_for(device: torch.device) -> torch.device:
    if device.type != torch_names.extra_device():
        return device
    if device.index is not None and device.index >= cards.count():
        raise RuntimeError(cards.missing(str(device)))
    return _HOST


def _card_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the card that an op computes on: the one in its arguments, else that of its first tensor; -1 for the current card."""
    for value in (kwargs.get("device"), *args):
        device = getattr(value[0] if isinstance(value, (list, tuple)) and value else value, "device", value)
        if isinstance(device, torch.device) and device.type == torch_names.extra_device() and device.index is not None:
            return int(device.index)
    return -1


def _first_dtype(args: Sequence[Any]) -> str | None:
    for tensor in tensors_in(args):
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return None


def _refuse_mixed_devices(plan: HostPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = tensors_in(args) + tensors_in(list(kwargs.values()))
    here = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
    stray = next((tensor for tensor in tensors if tensor.dim() and tensor.device != here), None)
    if stray is not None and here is not None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {plan.name} got tensors on {here} and on {stray.device} "
            f"(a {stray.device.type} tensor of shape {list(stray.shape)})"
        )


class OverflowFlag:
    """The overflow flag: `raised` when an op makes inf or NaN from finite inputs. Ops are checked only while `armed`."""

    def __init__(self) -> None:
        self.armed = False
        self.raised = False

    def clear(self) -> None:
        """Reset the flag."""
        self.raised = False

    def watch(self, inputs_finite: bool, outputs: Any) -> None:
        """Raise the flag when finite inputs gave a nonfinite output."""
        if inputs_finite and not all_finite(outputs):
            self.raised = True


FLAG = OverflowFlag()


def all_finite(value: Any) -> bool:
    """Return whether every number in tensors, lists and scalars is finite; NaN counts as not."""
    if isinstance(value, Tensor):
        numbers = (value.is_floating_point() or value.is_complex()) and value.layout == torch.strided
        return not numbers or bool(value.isfinite().all())
    if isinstance(value, (list, tuple)):
        return all(all_finite(item) for item in value)
    return math.isfinite(value) if isinstance(value, float) else True

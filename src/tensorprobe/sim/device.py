"""Register the simulated device with torch: `enable` once in a process; it cannot be undone.

PrivateUse1 is renamed. A device guard and hooks in Python make the autograd engine run a thread for the device. One boxed
fallback computes every op, and a `torch.<name>` module has what scripts expect of an accelerator. If torch lacks a private
name, `enable` raises `UnsupportedTorch` and changes nothing.

A guard written in Python has a weakness. While the exception of a hook passes through C++, it is still pending in the
interpreter. If the autograd engine asks the guard for its type then, Python fails the call, in a destructor, and the process
aborts. So the guard sets a pending exception aside, and a wrapper around the engine's entry raises it again in the thread
that called backward.

torch gives a module new parameters when it moves to a device of this kind; for its own devices it changes them in place. Tied
weights would be separated, and an optimizer made before the move would keep the old ones. On request torch swaps parameters
in place; this is done only for moves to and from the device.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensorprobe import torch_names
from tensorprobe.errors import SettingsError, UnsupportedTorch
from tensorprobe.sim import STATE

# Without this, composite C++ kernels would run these ops instead of the fallback. Whole ops are faster, and faults can name
# them.
_WHOLE_OPS = (
    "native_layer_norm",
    "native_group_norm",
    "embedding",
    "convolution_overrideable",
    "convolution_backward_overrideable",
)
# `torch.tensor(..., device=...)` calls these below the dispatch modes; while a mode is on, torch then looks for the kernel
# under the op's own name, not for a fallback, and ends in an internal assertion.
_BELOW_MODES = ("empty.memory_format", "empty_strided", "_copy_from")
_UNSUPPORTED_KEYS = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse compressed",
    "QuantizedPrivateUse1": "quantized",
    "NestedTensorPrivateUse1": "nested",
}
_libraries: list[torch.library.Library] = []  # registrations end when their library is collected


def enable(name: str) -> None:
    """Make `torch.device(name)` exist. A second call with this name does nothing, with another name it raises `SettingsError`."""
    if STATE.name == name:
        return
    if STATE.name is not None:
        raise SettingsError(
            f"the simulated device is already called {STATE.name!r} in this process; it cannot be renamed to {name!r}."
        )
    _check_torch()
    taken = torch_names.extra_device()
    if taken != "privateuseone":
        raise SettingsError(
            f"another extension already registered the device {taken!r} in this process; "
            "the simulated device cannot be added."
        )
    if not name.isidentifier() or hasattr(torch, name):
        raise SettingsError(
            f"{name!r} cannot name a device: it is not an identifier, or torch already has an attribute of that name."
        )
    _register(name)
    STATE.name = name
    _check_engine(name)


def _check_engine(name: str) -> None:
    """Raise SettingsError if a backward ran before: the engine counts devices once, so a later device has no thread."""
    if getattr(torch.__spec__, "_initializing", False):
        return  # no backward can have run yet, and the device's thread would wait for the import of torch to end
    from tensorprobe.sim import cards

    try:
        torch.ones(1, device=f"{name}:{cards.count() - 1}", requires_grad=True).sum().backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise SettingsError(
            f"the device {name!r} was enabled after the first backward of this process; torch can no longer run backward on it. "
            "Call sim.enable() before any training, ideally right after importing torch."
        ) from None


def _check_torch() -> None:
    if torch_names.accelerator_parts is None or torch_names.setup_python_backend is None:
        raise UnsupportedTorch(
            f"the simulated device needs torch {torch_names.SIMULATED_SINCE} or newer; this is {torch.__version__}. "
            "An older torch cannot register a device that is written in Python."
        )


def _register(name: str) -> None:
    from tensorprobe.sim import autocast, cards, collectives, fallback, memory
    from tensorprobe.sim.namespace import device_module

    hooks, device_guard = _make_hooks_and_guard()
    torch_names.setup_python_backend(name, backend_module=device_module(name), hook=hooks, device_guard=device_guard)
    cards.install(device_guard)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(fallback.run_op, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    _libraries.extend([everything, aten])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for key, layout in _UNSUPPORTED_KEYS.items():
            everything.fallback(_refusal(name, layout), key)
        # torch handles a conjugated source by cloning it with a copy, which would end up here again, without end.
        for key in ("Conjugate", "Negative", "ZeroTensor"):
            for copying in ("_copy_from", "_copy_from_and_resize"):
                aten.impl(copying, torch.library.fallthrough_kernel, key)
        for op in _whole_ops():
            aten.impl(op._name.removeprefix("aten::"), _bound(fallback.run_op, op), "PrivateUse1")
        if not torch.backends.cuda.is_built():
            # Nothing in this process can pin memory now; torch's own message would be about C++ interfaces.
            aten.impl("_pin_memory", _bound(fallback.run_op, _aten("_pin_memory")), "CPU")
        autocast.register(aten, name)
        _libraries.append(collectives.register(name))
    memory.install_storage_methods(name)
    _install_module_moves(name)
    torch_names.replace_engine_entry(_raising_lost)
    # The guard has no streams to wait for, and torch's own function requires them.
    torch.accelerator.synchronize = lambda device=None: None


def _whole_ops() -> list[Any]:
    """Return the ops that a composite C++ kernel would otherwise run instead of the fallback.

    Composite kernels of the foreach family loop over single tensors; those of structured ops allocate and call the out=
    form. Run whole, an op is one call, as on a real device, and a fault can name it.
    """
    has_kernel = torch_names.has_kernel
    whole = [_aten(name) for name in (*_WHOLE_OPS, *_BELOW_MODES)]
    for qualified in torch_names.all_op_names():
        if not qualified.startswith("aten::") or qualified.endswith("out"):
            continue
        structured = has_kernel(qualified, "CompositeExplicitAutogradNonFunctional") and has_kernel(qualified, "CPU")
        if structured or qualified.startswith("aten::_foreach_"):
            whole.append(_aten(qualified.removeprefix("aten::")))
    return whole


def _aten(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _bound(kernel: Any, op: Any) -> Any:
    return lambda *args, **kwargs: kernel(op, *args, **kwargs)


def _refusal(name: str, layout: str) -> Any:
    def refuse(op: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the simulated device {name!r} has no {layout} tensors ({op}); use dense ones, or the CPU"
        )

    return refuse


# Calling any function of the C API through ctypes raises whatever exception is pending in this thread.
_surface_pending = ctypes.pythonapi.Py_IsInitialized
_lost: deque[BaseException] = deque(maxlen=16)


def _make_hooks_and_guard() -> tuple[Any, Any]:
    """Return the hooks and the guard. Their classes are made here because their bases are private and may be missing."""
    device_type = torch_names.DeviceType.PrivateUse1

    class Hooks(torch_names.accelerator_parts.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, _index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(torch_names.accelerator_parts.DeviceGuard):
        def type_(self) -> Any:
            try:
                _surface_pending()
            except BaseException as pending:
                _lost.append(pending)
            return device_type

    return Hooks(), Guard()


def _raising_lost(run: Callable[..., Any]) -> Callable[..., Any]:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except SystemError:
            if not _lost:
                raise
        raise _lost.pop()

    return _engine_run_backward


def _install_module_moves(name: str) -> None:
    """Wrap the three methods that move a module: `to`, `cpu`, and the one with the name of the device."""

    def target_of_to(args: Any, kwargs: Any) -> str | None:
        device = torch_names.functions_of_nn._parse_to(*args, **kwargs)[0]
        return None if device is None else str(device.type)

    targets: dict[str, Callable[[Any, Any], str | None]] = {
        "to": target_of_to,
        "cpu": lambda _args, _kwargs: "cpu",
        name: lambda _args, _kwargs: name,
    }
    for method, target in targets.items():
        setattr(nn.Module, method, _keeping_parameters(getattr(nn.Module, method), target, name))


def _keeping_parameters(
    move: Callable[..., Any], target: Callable[[Any, Any], str | None], name: str
) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        if swapping or not _crosses(self, target(args, kwargs), name):
            return move(self, *args, **kwargs)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return move(self, *args, **kwargs)
        except RuntimeError as refused:
            if "Couldn't swap" not in str(refused):
                raise
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        # Something in C++ still holds a parameter, such as a graph not yet freed: move it torch's usual way.
        return move(self, *args, **kwargs)

    return moved


def _crosses(module: nn.Module, target: str | None, name: str) -> bool:
    if target is None:
        return False
    here = {parameter.device.type for parameter in module.parameters()}
    return bool(here - {name}) if target == name else name in here

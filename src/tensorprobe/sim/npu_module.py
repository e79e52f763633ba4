"""A stand-in for the module `torch_npu`: what the older tools call on a real NPU, on the simulated one.

Dump calls remember their arguments (`dump_calls`), the overflow calls read and clear the device's overflow flag,
and the ops of `npu_ops` are there by their names. Whatever is not here is an `AttributeError`, as with any module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from tensorprobe.errors import SettingsError
from tensorprobe.sim import npu_ops
from tensorprobe.sim.fallback import FLAG

VERSION = "0.0+simulated"
ND_FORMAT = 2
_STATUS_SIZE = 8
dump_calls: list[tuple[str, ...]] = []
"""The arguments of the calls of init_dump, set_dump and finalize_dump, in order."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the stand-in when the program imports torch_npu, and the real package is absent."""

    def find_spec(self, fullname: str, path: Any, target: types.ModuleType | None = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == "torch_npu" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or _make()  # it is there when loading torch has made it

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is whole."""


def offer(name: str) -> None:
    """Let `import torch_npu` find the stand-in, if the device is called npu: last on the path, so a real package wins."""
    if name == "npu" and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def install(name: str) -> types.ModuleType:
    """Import the stand-in and return it; the device must be called npu, and the real package must be absent."""
    if name != "npu":
        raise SettingsError(f"the stand-in for torch_npu needs the device to be called 'npu', not {name!r}.")
    offer(name)
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not isinstance(spec.loader, Finder):
        raise SettingsError("the real torch_npu is installed in this environment; the stand-in does not replace it.")
    return importlib.import_module("torch_npu")


def _make() -> types.ModuleType:
    module = types.ModuleType("torch_npu", "Stand-in for torch_npu on a simulated device.")
    device: Any = torch.npu
    for key, value in {**_dump(), **_overflow_functions(), **_switches()}.items():
        setattr(device, key, value)
    parts: dict[str, Any] = {
        "__version__": VERSION,
        "npu": device,
        "_C": _private(device),
        "utils": _utilities(),
        **npu_ops.register(),
        **npu_ops.register_composites(_composites()),
        "get_npu_format": lambda tensor: ND_FORMAT,
    }
    for key, value in parts.items():
        setattr(module, key, value)
    sys.modules.update({"torch_npu.npu": device, "torch_npu._C": parts["_C"]})
    sys.modules |= {"torch_npu.utils": module.utils, "torch_npu.utils.device_guard": module.utils.device_guard}
    sys.modules["torch_npu.npu.utils"] = device.utils
    FLAG.armed = True
    return module


def _dump() -> dict[str, Any]:
    def noted(name: str) -> Any:
        return lambda *args: dump_calls.append((name, *map(str, args)))

    return {name: noted(name) for name in ("init_dump", "set_dump", "finalize_dump")}


def _overflow_functions() -> dict[str, Any]:
    def npu_check_overflow(value: Any) -> bool:
        """Return whether a gradient has overflowed, or, for a number, whether the flag is raised."""
        if isinstance(value, Tensor):
            return not bool(value.detach().isfinite().all())
        return FLAG.raised

    functions = {
        "npu_check_overflow": npu_check_overflow,
        "get_npu_overflow_flag": lambda: FLAG.raised,
        "clear_npu_overflow_flag": FLAG.clear,
    }
    utils = types.ModuleType("torch_npu.npu.utils")
    for key, value in functions.items():
        setattr(utils, key, value)
    return {**functions, "utils": utils}


def _switches() -> dict[str, Any]:
    return {
        "conv": types.SimpleNamespace(allow_hf32=False),
        "matmul": types.SimpleNamespace(allow_hf32=False),
        "set_compile_mode": lambda jit_compile=False: None,
        "set_option": lambda option: None,
    }


def _private(device: Any) -> types.ModuleType:
    private = types.ModuleType("torch_npu._C")
    private._clear_overflow_npu = FLAG.clear  # type: ignore[attr-defined]
    private._check_overflow_npu = lambda: FLAG.raised  # type: ignore[attr-defined]
    private._npu_getDevice = device.current_device  # type: ignore[attr-defined]
    private._npu_setDevice = device.set_device  # type: ignore[attr-defined]
    private._npu_getDeviceCount = device.device_count  # type: ignore[attr-defined]
    return private


def _utilities() -> types.ModuleType:
    """`torch_npu.utils` with `device_guard`, whose decorator gives the device to the wrappers of the older tools."""
    utils, guard = types.ModuleType("torch_npu.utils"), types.ModuleType("torch_npu.utils.device_guard")
    utils.__path__ = []  # a package
    guard.torch_device_guard = lambda function: function  # type: ignore[attr-defined]
    utils.device_guard = guard  # type: ignore[attr-defined]
    return utils


def _composites() -> dict[Any, str]:
    """Ops of the status register (eight floats, of which the first is 1 after an overflow) and of private memory formats,
    of which there is one, the plain one."""

    def npu_alloc_float_status(_like: Tensor) -> Tensor:
        return torch.zeros(_STATUS_SIZE, device="npu")

    def npu_get_float_status(status: Tensor) -> Tensor:
        status[0] = float(FLAG.raised)
        return status

    def npu_clear_float_status(status: Tensor) -> Tensor:
        FLAG.clear()
        return status.zero_()

    def one_(tensor: Tensor) -> Tensor:
        return tensor.fill_(1)

    def npu_format_cast(tensor: Tensor, acl_format: int) -> Tensor:
        return tensor.clone()

    def empty_with_format(
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        acl_format: int = 2,
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device or "npu")

    return {
        npu_alloc_float_status: "(Tensor self) -> Tensor",
        npu_get_float_status: "(Tensor(a!) self) -> Tensor(a!)",
        npu_clear_float_status: "(Tensor(a!) self) -> Tensor(a!)",
        one_: "(Tensor(a!) self) -> Tensor(a!)",
        npu_format_cast: "(Tensor self, int acl_format) -> Tensor",
        empty_with_format: (
            "(int[] size, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, "
            f"int acl_format={ND_FORMAT}) -> Tensor"
        ),
    }

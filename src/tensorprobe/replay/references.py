"""CPU functions for ops without a CPU kernel: those that the user registers, and ours for ops of torch_npu.

Importing this imports no torch. A replay runs in a process of its own, so a reference is known by its import path. These
names come from the user, never from a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError

_registered: dict[str, str] = {}
_loaded: dict[str, Callable[..., Any]] = {}


def reference(name: str, function: Callable[..., Any]) -> None:
    """Register a function that computes an op on the CPU, for `audit`, `precheck` and `compare`.

        tensorprobe.reference("torch_npu.npu_rms_norm", my_references.rms_norm)

    Args:
        name: the op, as the program or the run names it: `torch_npu.npu_rms_norm`, `torch.ops.mylib.scale`, `Ops.mylib.scale`.
        function: takes the arguments of the op. It must be importable, since calls are replayed in processes of their own.
    """
    home, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not home or home == "__main__" or not path or "<" in path:
        raise SettingsError(
            f"the reference of {name!r} is {path or function!r} of {home or 'no module'}, which no other process can import.\n"
            "  Define it at the top level of a module."
        )
    _registered[key_of(name)] = f"{home}:{path}"


def parse_references(given: Any, key: str) -> dict[str, str]:
    """Return what `NAME=module:function` texts, or a mapping, ask for."""
    pairs = given.items() if isinstance(given, Mapping) else [str(text).partition("=")[::2] for text in given]
    found = {}
    for name, place in pairs:
        if not name or not all(str(place).partition(":")[::2]):
            raise SettingsError(f"{key} is {name}={place}; expected NAME=module:function.")
        found[key_of(name)] = str(place)
    return found


def registered() -> dict[str, str]:
    """Return the registered references: op → `module:function`."""
    return dict(_registered)


def search_path() -> list[str]:
    """Return where this process would import a reference from, the working directory included."""
    return [*dict.fromkeys(str(Path(place).absolute()) for place in (*sys.path, ""))]


def use_references(places: Mapping[str, str], folders: Iterable[str]) -> None:
    """Import references in the process that replays calls. SettingsError if one cannot be imported."""
    sys.path.extend(folder for folder in folders if places and folder not in sys.path)
    for name, place in places.items():
        module, _, path = place.partition(":")
        try:
            found: Any = import_module(module)
            _loaded[name] = reduce(getattr, path.split("."), found)
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"the reference of {name!r}, {place}, cannot be imported: {error}.") from None


def find_reference(op: str) -> Callable[..., Any] | None:
    """Return the function that computes an op on the CPU in place of its own."""
    key = key_of(op)
    if key in _loaded or not key.startswith("npu."):
        return _loaded.get(key)
    from tensorprobe import npu_definitions

    name = key.removeprefix("npu.")
    found: Callable[..., Any] | None = None if name.startswith("_") else vars(npu_definitions).get(name)
    return found if getattr(found, "__module__", "") == npu_definitions.__name__ else None


def key_of(name: str) -> str:
    """Return one spelling of an op: `npu.npu_rms_norm` for `torch_npu.npu_rms_norm`, `NPU.npu_rms_norm`, `npu::npu_rms_norm`."""
    name = name.replace("::", ".").removeprefix("torch.ops.").removesuffix(".default")
    family, _, rest = name.partition(".")
    if family in ("NPU", "torch_npu"):
        return f"npu.{rest}"
    return rest if family in ("Ops", "Aten") else name

"""Which code does the arithmetic: the native kernel, or its numpy twin.

`kernel()` gives the extension module, or None when it was not built or `TENSORPROBE_NO_NATIVE=1` is set.
`implementation()` gives the module that serves: kernel and twin have the same functions, for single tensors and for pairs of them,
with the same results.
Numpy is imported only when the twin serves.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

SWITCH = "TENSORPROBE_NO_NATIVE"
EXTENSION = "tensorprobe.numerics._native"


def switched_off() -> bool:
    """Whether the environment asks for Python where there is native code."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def kernel() -> ModuleType | None:
    """The native extension, or None where the twin has to serve. Decided once for a process."""
    return _load()[0]


@cache
def implementation() -> ModuleType:
    """The module whose `summarize`, `summarize_many`, `peak`, `measure_pairs` and `copy` are to be used."""
    return kernel() or importlib.import_module("tensorprobe.numerics.twin")


def describe() -> str:
    """One line for people: `native (AVX2, F16C)`, `native (portable)` or `numpy twin (why)`."""
    native, reason = _load()
    if native is None:
        return f"numpy twin ({reason})"
    return f"native ({', '.join(native.features()) or 'portable'})"


@cache
def _load() -> tuple[ModuleType | None, str]:
    """The extension, or why it does not serve."""
    if switched_off():
        return None, f"{SWITCH} is set"
    try:
        return importlib.import_module(EXTENSION), ""
    except ModuleNotFoundError:
        return None, "extension not built"
    except ImportError as problem:
        return None, f"extension does not load: {problem}"

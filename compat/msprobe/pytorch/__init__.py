"""`from msprobe.pytorch import PrecisionDebugger, seed_all, compare`: each name is loaded when it is first asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_HOMES = {
    "PrecisionDebugger": "debugger",
    "module_dump": "debugger",
    "module_dump_end": "debugger",
    "seed_all": "common",
    "compare": "compare",
    "compare_distributed": "compare",
}

__all__ = list(_HOMES)


class _Names(ModuleType):
    """This module: `compare` is the function here, also after the package `compare` beside it was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Names

"""The C loops of capture, where they were built; None where they were not, and the Python beside them does the work."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tensorprobe.numerics.native import switched_off


def load() -> ModuleType | None:
    """The extension, unless it is absent or switched off by TENSORPROBE_NO_NATIVE=1."""
    if switched_off():
        return None
    try:
        return import_module("tensorprobe._fast")
    except ImportError:
        return None


fast = load()

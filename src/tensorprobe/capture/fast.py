"""The C loops of capture, where they were built; None where they were not, and the Python beside them does the work."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType


def load() -> ModuleType | None:
    """The extension, unless it is absent or switched off by TENSORPROBE_NO_NATIVE=1."""
    if os.environ.get("TENSORPROBE_NO_NATIVE") == "1":
        return None
    try:
        return import_module("tensorprobe.capture._fast")
    except ImportError:
        return None


fast = load()

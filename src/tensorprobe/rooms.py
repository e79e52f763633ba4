"""Lets a room be called like its main function: `tensorprobe.capture(...)` although `tensorprobe.capture` is a package.

Python binds a package's name in its parent as soon as anything inside is imported, so the name cannot belong to a function alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(room: str, function: Callable[..., Any]) -> None:
    """Calling the module named `room` calls `function`."""

    class CallableRoom(ModuleType):
        __call__ = staticmethod(function)

    sys.modules[room].__class__ = CallableRoom

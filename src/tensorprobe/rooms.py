"""Lets a room be called like its main function: `tensorprobe.capture(...)` although `tensorprobe.capture` is a package.

Python binds a package's name in its parent as soon as anything inside is imported, so the name cannot belong to a function alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(room: str, function: Callable[..., Any] | None = None) -> None:
    """Calling the module named `room` calls `function`; without one, what the front door has under that name.

    The latter is for a room whose function stands higher up in the house than the room itself.
    """

    def from_the_front_door(*args: Any, **kwargs: Any) -> Any:
        door, _, name = room.partition(".")
        home = import_module(door)._CALLS[name]
        return getattr(import_module(home), name)(*args, **kwargs)

    class CallableRoom(ModuleType):
        __call__ = staticmethod(function or from_the_front_door)

    sys.modules[room].__class__ = CallableRoom

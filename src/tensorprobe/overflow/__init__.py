"""Where infinities and NaN are born, and whether they were meant.

Calling `tensorprobe.overflow(model, out=...)` gives a watch over a training; `find_overflow` asks the same of a recorded run.
Names are loaded when they are first used: asking a run imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorprobe.rooms import make_callable

if TYPE_CHECKING:
    from tensorprobe.overflow.born import BornCall
    from tensorprobe.overflow.recorded import find_overflow
    from tensorprobe.overflow.result import OverflowResult
    from tensorprobe.overflow.watch import OverflowWatch, overflow

_HOMES = {
    "BornCall": "tensorprobe.overflow.born",
    "OverflowResult": "tensorprobe.overflow.result",
    "OverflowWatch": "tensorprobe.overflow.watch",
    "find_overflow": "tensorprobe.overflow.recorded",
    "overflow": "tensorprobe.overflow.watch",
}
__all__ = ["BornCall", "OverflowResult", "OverflowWatch", "find_overflow", "overflow"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorprobe.overflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def _watch(*args: Any, **kwargs: Any) -> OverflowWatch:
    found: OverflowWatch = __getattr__("overflow")(*args, **kwargs)
    return found


make_callable(__name__, _watch)

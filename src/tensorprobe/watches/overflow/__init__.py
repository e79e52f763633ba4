"""Where infinities and NaN are born, and whether they were meant.

Calling `tensorprobe.overflow(model, out=...)` gives a watch over a training; `find_overflow` asks the same of a recorded run.
Names are loaded when they are first used: asking a run imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorprobe.watches.overflow.born import BornCall
    from tensorprobe.watches.overflow.recorded import find_overflow
    from tensorprobe.watches.overflow.result import OverflowResult
    from tensorprobe.watches.overflow.watch import OverflowWatch, overflow

_HOMES = {
    "BornCall": "tensorprobe.watches.overflow.born",
    "OverflowResult": "tensorprobe.watches.overflow.result",
    "OverflowWatch": "tensorprobe.watches.overflow.watch",
    "find_overflow": "tensorprobe.watches.overflow.recorded",
    "overflow": "tensorprobe.watches.overflow.watch",
}
__all__ = ["BornCall", "OverflowResult", "OverflowWatch", "find_overflow", "overflow"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorprobe.watches.overflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

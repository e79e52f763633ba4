"""The second execution of every ATen op, measured and judged at once, while the program runs."""

from typing import TYPE_CHECKING

from tensorprobe.lazy import lazy

if TYPE_CHECKING:
    from tensorprobe.watches.online.watch import OnlineWatch, online

__all__ = ["OnlineWatch", "online"]

__getattr__ = lazy(__name__, dict.fromkeys(__all__, "tensorprobe.watches.online.watch"))

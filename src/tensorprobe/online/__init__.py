"""The second execution of every ATen op, measured and judged at once, while the program runs."""

from tensorprobe.online.watch import OnlineWatch, online
from tensorprobe.rooms import make_callable

__all__ = ["OnlineWatch", "online"]

make_callable(__name__, online)

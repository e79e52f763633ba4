"""The second execution of every ATen op, measured and judged at once, while the program runs."""

from tensorprobe.watches.online.watch import OnlineWatch, online

__all__ = ["OnlineWatch", "online"]

"""Comparing two dumps: `compare` for one rank, `compare_distributed` for all of them."""

from tensorprobe.legacy.msprobe.compare import compare, compare_distributed

__all__ = ["compare", "compare_distributed"]

"""Comparing two dumps: `compare` for one rank, `compare_distributed` for all of them. Imports neither torch nor numpy."""

from tensorprobe.legacy.msprobe.distributed_compare import compare_distributed
from tensorprobe.legacy.msprobe.pt_compare import compare

__all__ = ["compare", "compare_distributed"]

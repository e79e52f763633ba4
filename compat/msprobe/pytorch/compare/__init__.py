"""Comparing two dumps: `compare` for one rank, `compare_distributed` for all of them. Imports neither torch nor numpy."""

from __future__ import annotations

from msprobe.pytorch.compare.distributed_compare import compare_distributed
from msprobe.pytorch.compare.pt_compare import compare

__all__ = ["compare", "compare_distributed"]

"""Runs a comparison from end to end: opens two runs, measures and judges every rank, gathers the answer.

Ranks are independent of each other: each is a task that runs here, in processes of this machine, or elsewhere.
"""

from tensorprobe.engine.comparison import compare
from tensorprobe.engine.result import Result, Rows

__all__ = ["Result", "Rows", "compare"]

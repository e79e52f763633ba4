"""The table of planted births that bench/overflow.py measures, for the tests.

The folder of the benchmarks is in the path only while they are imported: it holds a `capture.py` and a `compare.py`, which would
hide the packages of tests of that name.
"""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = str(Path(__file__).resolve().parents[3] / "bench")

sys.path.insert(0, BENCH)
try:
    from overflow_births import ANYWHERE, on_device
    from overflow_case import Outcome, Planted, Watching, watch_planted
    from overflow_forward import fp16_attention
    from overflow_ranks import RANKS, run_ranks
    from overflow_sim import SIM
    from overflow_training import TRAINING
finally:
    sys.path.remove(BENCH)

__all__ = [
    "ANYWHERE",
    "RANKS",
    "SIM",
    "TRAINING",
    "Outcome",
    "Planted",
    "Watching",
    "assert_told",
    "fp16_attention",
    "on_device",
    "run_ranks",
    "watch_planted",
]


def assert_told(outcome: Outcome) -> None:
    """What was expected was told, all of it, in its order, and nothing else."""
    assert outcome.error == ""
    assert outcome.told == outcome.expected

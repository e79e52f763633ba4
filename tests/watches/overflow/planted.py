"""The table of planted NaN and inf that bench.overflow measures, for the tests."""

from __future__ import annotations

from bench.overflow.case import Outcome, Planted, Watching, watch_planted
from bench.overflow.forward import fp16_attention
from bench.overflow.planted import ANYWHERE, on_device
from bench.overflow.ranks import RANKS, run_ranks
from bench.overflow.sim import SIM
from bench.overflow.training import TRAINING

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

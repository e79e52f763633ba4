"""Watches a PyTorch program. The only room that installs hooks, modes or patches, and it removes every one of them."""

from tensorprobe.taps.probe import Probe, active_probe, capture
from tensorprobe.taps.seed import seed_all

__all__ = ["Probe", "active_probe", "capture", "seed_all"]

"""Watches a PyTorch program. The only room that installs hooks, modes or patches, and it removes every one of them."""

from tensorprobe.capture.probe import Probe, active_probe, capture
from tensorprobe.capture.seed import seed_all
from tensorprobe.rooms import make_callable

__all__ = ["Probe", "active_probe", "capture", "seed_all"]

make_callable(__name__, capture)

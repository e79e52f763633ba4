"""Watches a PyTorch program. The only room that installs hooks, modes or patches, and it removes every one of them."""

from typing import TYPE_CHECKING

from tensorprobe.lazy import lazy

if TYPE_CHECKING:
    from tensorprobe.taps.probe import Probe, active_probe, capture, watch_kernels
    from tensorprobe.taps.seed import seed_all

__all__ = ["Probe", "active_probe", "capture", "seed_all", "watch_kernels"]

__getattr__ = lazy(
    __name__,
    {
        "Probe": "tensorprobe.taps.probe",
        "active_probe": "tensorprobe.taps.probe",
        "capture": "tensorprobe.taps.probe",
        "seed_all": "tensorprobe.taps.seed",
        "watch_kernels": "tensorprobe.taps.probe",
    },
)

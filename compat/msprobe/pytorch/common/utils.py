"""`from msprobe.pytorch.common.utils import seed_all`: the older tool's name of `tensorprobe.seed_all`."""

from tensorprobe.legacy.msprobe import seed_all

__all__ = ["seed_all"]

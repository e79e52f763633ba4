"""`msCheckerConfig`: the settings of the package, one set for the process."""

from tensorprobe.legacy.checker.config import msCheckerConfig

__all__ = ["msCheckerConfig"]

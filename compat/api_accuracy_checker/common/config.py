"""`from api_accuracy_checker.common.config import msCheckerConfig`: the settings of the package."""

from tensorprobe.legacy.checker.config import msCheckerConfig

__all__ = ["msCheckerConfig"]

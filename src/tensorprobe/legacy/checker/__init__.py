"""What api_accuracy_checker does: its recording and its commands. The package of that name holds no more than names."""

from __future__ import annotations

from tensorprobe.legacy.speaking import logger_of

logger, speak = logger_of("api_accuracy_checker")

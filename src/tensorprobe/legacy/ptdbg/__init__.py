"""What ptdbg_ascend does: its dumps, its comparison, its commands. The package of that name holds no more than names."""

from __future__ import annotations

from tensorprobe.legacy.speaking import logger_of

logger, speak = logger_of("ptdbg_ascend")

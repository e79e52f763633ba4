"""What the package tells its user while it works."""

from __future__ import annotations

import logging
from functools import partial

from tensorprobe.legacy.speaking import speak_through

logger = logging.getLogger("api_accuracy_checker")
speak = partial(speak_through, logger)

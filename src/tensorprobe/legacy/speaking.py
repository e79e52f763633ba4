"""What a package of an older tool's name tells its user while it works: on stderr, unless the program has set up logging itself."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment: tests and notebooks replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def speak_through(logger: logging.Logger) -> None:
    """Show messages from INFO on, with time and process, if nobody has decided otherwise."""
    if logger.handlers or logger.level or logging.getLogger().handlers:
        return
    handler = _Stderr()
    handler.setFormatter(
        logging.Formatter("%(asctime)s (%(process)d) - [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

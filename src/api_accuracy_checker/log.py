"""What the package tells its user while it works: on stderr, unless the program has set up logging itself."""

from __future__ import annotations

import logging

logger = logging.getLogger("api_accuracy_checker")


def speak() -> None:
    """Show messages from INFO on, with time and process, if nobody has decided otherwise."""
    if logger.handlers or logger.level or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s (%(process)d) - [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

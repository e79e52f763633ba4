"""What a package of an older tool's name shows its user: on stderr, unless the program has set up logging itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO, TypeVar, cast

from tensorprobe.errors import TensorprobeError
from tensorprobe.taps.uncaught import show_in_one_line


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has no StreamHandler[TextIO]
    """Writes to what is stderr at that moment: tests and notebooks replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def logger_of(name: str) -> tuple[logging.Logger, Callable[[], None]]:
    """Return the logger of an old name, and a function that lets it be seen; every entry point calls that first."""
    logger = logging.getLogger(name)
    return logger, partial(_show, logger)


def _show(logger: logging.Logger) -> None:
    """Show messages from INFO on, with time and process, unless the program decided otherwise."""
    if logger.handlers or logger.level or logging.getLogger().handlers:
        return
    handler = _Stderr()
    handler.setFormatter(
        logging.Formatter("%(asctime)s (%(process)d) - [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


Function = TypeVar("Function", bound=Callable[..., Any])


def without_traceback(function: Function) -> Function:
    """Return the function; a script that does not catch its error ends with the message alone.

    The error is what it was. The first one puts a hook before Python's own, which shows all other errors as before.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TensorprobeError as error:
            show_in_one_line(error)
            raise

    return cast(Function, call)


def say_if_published(name: str, published: str) -> None:
    """Warn when the distribution `published`, which has the same import name, is installed as well."""
    try:
        found = version(published)
    except PackageNotFoundError:
        return
    logger, show = logger_of(name)
    show()
    logger.warning(
        "%s %s is installed too, and both bring the package %s. This one is tensorprobe's.\n"
        "  Keep one of them: pip uninstall %s, or pip uninstall %s. Then install the other again: they share a folder.",
        *(published, found, name, published, name),
    )

"""How Python shows an error that a script does not catch: in one line, for errors that are marked so.

The hook is put before Python's own with the first such error, and stays: every other error is left to the hook before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def show_in_one_line(error: Exception) -> None:
    """Make this error, if uncaught, end the program with its message and no traceback."""
    error.__dict__["in_one_line"] = True
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)


class _OneLine:
    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if getattr(error, "in_one_line", False):
            sys.stderr.write(f"{kind.__name__}: {error}\n")
        else:
            self._before(kind, error, traceback)

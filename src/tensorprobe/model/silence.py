"""Runs something without its warnings and without a trace of that.

`warnings.catch_warnings` makes Python forget which warnings it has shown, and silences other threads too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Here:
    """Stands for the pattern of messages in a filter of Python: matches every message of the thread that made it."""

    def __init__(self) -> None:
        self.thread: int | None = threading.get_ident()

    def match(self, _message: str) -> bool:
        return threading.get_ident() == self.thread


@contextmanager
def silent() -> Iterator[None]:
    """Ignore what this thread warns of in the block."""
    here = _Here()
    entry: Any = ("ignore", here, Warning, None, 0)
    filters: list[Any] = warnings.filters  # type: ignore[assignment]  # a list, which Python reads anew for each warning
    try:
        filters.insert(0, entry)
        yield
    finally:
        here.thread = None  # another thread may have copied the list
        with suppress(ValueError):
            filters.remove(entry)

"""Exceptions that the program raises into our code: by a signal handler, a tracing hook, or another thread.

They may be of any type, so an `except Exception` of ours would swallow them. What gives them away is their traceback: such
a handler is called with the frame that it interrupts.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = (str(Path(__file__).parents[1]) + "/",)
_KNOWN = frozenset(("builtins", "tensorprobe", "torch", "numpy", "msgspec", *sys.stdlib_module_names))


def is_from_program(error: BaseException) -> bool:
    """Return whether an exception that came out of our code was raised by the program, not by us or by torch."""
    if not isinstance(error, Exception):
        return True
    found = error.__traceback__
    handlers = None
    only_ours = True
    while found is not None:
        frame = found.tb_frame
        if not _is_ours(frame):
            only_ours = only_ours and "/torch/" in frame.f_code.co_filename
            handlers = _codes_of_handlers() if handlers is None else handlers
            if id(frame.f_code) in handlers or _holds(frame, frame.f_back):
                return True
        found = found.tb_next
    # Raised in this thread by another one: nothing of ours could raise a type of the program's.
    return only_ours and type(error).__module__.partition(".")[0] not in _KNOWN


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _holds(frame: FrameType, interrupted: FrameType | None) -> bool:
    """Return whether a frame was given the frame it was called from, as handlers of signals and tracing hooks are."""
    if interrupted is None or not _is_ours(interrupted):
        return False
    for value in frame.f_locals.values():
        if value is interrupted or (type(value) is tuple and any(each is interrupted for each in value)):
            return True
    return False


def _codes_of_handlers() -> set[int]:
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while hasattr(handler, "func"):
            handler = handler.func
        function = getattr(handler, "__func__", handler)
        for each in (function, vars(type(function)).get("__call__")):
            if hasattr(each, "__code__"):
                codes.add(id(each.__code__))
    return codes

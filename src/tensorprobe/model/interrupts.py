"""Exceptions that the program raises into our code: by a signal handler, a tracing hook, or another thread.

They may be of any type, so an `except Exception` of ours would swallow them. What gives them away:

- A handler is called with the frame that it interrupts, and both are in the traceback.
- One that another thread raises has no message, or a type that neither Python nor torch nor we define, and nothing but
  our own code in its traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).parents[1]) + "/"
_STANDARD = str(Path(os.__file__).parent) + "/"
_KNOWN = frozenset(("builtins", "tensorprobe", "torch", "numpy", "msgspec", *sys.stdlib_module_names))
_WITHOUT_MESSAGE = (AssertionError, MemoryError, NotImplementedError, StopIteration)
"""What our code, or torch, may raise without a message."""


def is_from_program(error: BaseException) -> bool:
    """Return whether an exception that came out of our code was raised by the program, not by us or by torch."""
    if not isinstance(error, Exception):
        return True
    found = error.__traceback__
    handlers, in_sink = None, False
    while found is not None:
        frame = found.tb_frame
        if not frame.f_code.co_filename.startswith(_OURS):
            handlers = _codes_of_handlers() if handlers is None else handlers
            if id(frame.f_code) in handlers or _holds(frame, frame.f_back):
                return True
            in_sink = in_sink or not _is_known(frame.f_code.co_filename)  # code that we have called
        found = found.tb_next
    if in_sink:
        return False
    is_foreign = type(error).__module__.partition(".")[0] not in _KNOWN
    return is_foreign or not (error.args or isinstance(error, _WITHOUT_MESSAGE))


def let_through(error: BaseException) -> None:
    """Raise the exception again if the program raised it into our code: for every `except` of ours that may meet one."""
    if is_from_program(error):
        raise error


class ignoring(contextlib.suppress):
    """Like `contextlib.suppress`, but what the program raised into our code goes on."""

    def __exit__(self, *raised: Any) -> bool:
        return bool(super().__exit__(*raised)) and not is_from_program(raised[1])


def _is_known(file: str) -> bool:
    """Return whether it is a file of torch or of Python."""
    return "/torch/" in file or file.startswith("<") or (file.startswith(_STANDARD) and "-packages/" not in file)


def _holds(frame: FrameType, interrupted: FrameType | None) -> bool:
    """Return whether a frame was given the frame it was called from, as handlers of signals and tracing hooks are."""
    if interrupted is None:
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

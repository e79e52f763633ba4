"""The device guard and hooks in Python that make torch treat the simulated device as an accelerator with threads of
its own.

A guard written in Python has a weak spot: the autograd engine asks it for its type while a hook's exception is on its
way through C++ and still pending in the interpreter; Python then fails the call, in a destructor, and the process
aborts. So the guard takes a pending exception out of the way, and `install` wraps the entry to the engine, which
raises it again in the thread that called backward.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from tensorprobe import torch_names

# Calling any function of the C API through ctypes raises whatever exception is pending in this thread.
_surface_pending = ctypes.pythonapi.Py_IsInitialized
_lost: deque[BaseException] = deque(maxlen=16)


def make_hooks_and_guard() -> tuple[Any, Any]:
    """The two objects that torch asks; their classes are made here because their bases are private and may be absent."""
    device_type = torch_names.DeviceType.PrivateUse1

    class Hooks(torch_names.accelerator_parts.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, _index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(torch_names.accelerator_parts.DeviceGuard):
        def type_(self) -> Any:
            try:
                _surface_pending()
            except BaseException as pending:
                _lost.append(pending)
            return device_type

    return Hooks(), Guard()


def install() -> None:
    """Let exceptions of hooks reach the caller of backward."""
    torch_names.replace_engine_entry(_raising_lost)


def _raising_lost(run: Callable[..., Any]) -> Callable[..., Any]:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except SystemError:
            if not _lost:
                raise
        raise _lost.pop()

    return _engine_run_backward

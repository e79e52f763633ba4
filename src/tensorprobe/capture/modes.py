"""Puts torch modes in place and takes them away by identity.

A mode goes to the *bottom* of its stack: then whatever else the user enters and leaves is popped from above it, and it
sees what is really executed. New threads start with empty stacks, so `Thread.run` is wrapped to put the modes there too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.capture import private


class ModeStack:
    """The modes of one probe: one of each kind, or none. `install` and `remove` are for the calling thread."""

    def __init__(self, function: TorchFunctionMode | None, dispatch: TorchDispatchMode | None) -> None:
        self._function = function
        self._dispatch = dispatch
        self._original_run: Any = None

    def install(self) -> None:
        """Put the modes below all others of this thread."""
        if self._function is not None:
            with _lifted_function_modes():
                private.push_function_mode(self._function)
        if self._dispatch is not None:
            with _lifted_dispatch_modes():
                self._dispatch.__enter__()

    def remove(self) -> None:
        """Take the modes out of this thread's stacks, wherever they are; nothing when they are not there."""
        if self._function is not None:
            above = []
            while private.function_modes():
                mode = private.pop_function_mode()
                if mode is self._function:
                    break
                above.append(mode)
            for mode in reversed(above):
                private.push_function_mode(mode)
        if self._dispatch is not None:
            _remove_dispatch(self._dispatch)

    def follow_threads(self) -> None:
        """From now on threads that are started have the modes while they run."""
        original = self._original_run = threading.Thread.run
        stack = self

        def run(thread: threading.Thread) -> None:
            stack.install()
            try:
                original(thread)
            finally:
                stack.remove()

        threading.Thread.run = run  # type: ignore[method-assign, assignment]

    def unfollow_threads(self) -> None:
        """Threads start as they did before."""
        if self._original_run is not None:
            threading.Thread.run = self._original_run  # type: ignore[method-assign]
            self._original_run = None


@contextlib.contextmanager
def _lifted_function_modes() -> Iterator[None]:
    lifted = [private.pop_function_mode() for _ in range(private.function_modes())]
    try:
        yield
    finally:
        for mode in reversed(lifted):
            private.push_function_mode(mode)


@contextlib.contextmanager
def _lifted_dispatch_modes() -> Iterator[None]:
    lifted = [private.pop_dispatch_mode() for _ in range(private.dispatch_modes())]
    try:
        yield
    finally:
        for mode in reversed(lifted):
            private.push_dispatch_mode(mode)


def _remove_dispatch(dispatch: TorchDispatchMode) -> None:
    above: list[Any] = []
    while private.dispatch_modes():
        mode = private.pop_dispatch_mode()
        if mode is dispatch:
            break
        above.append(mode)
    else:
        for mode in reversed(above):
            private.push_dispatch_mode(mode)
        return
    if above:
        # torch keeps "was a mode on before me?" in each mode; the one above must now answer as ours would have
        _hand_over_flags(dispatch, above[-1])
    else:
        private.push_dispatch_mode(dispatch)
        dispatch.__exit__(None, None, None)
    for mode in reversed(above):
        private.push_dispatch_mode(mode)


def _hand_over_flags(leaving: Any, above: Any) -> None:
    for name, flags in vars(leaving).items():
        if name.startswith("old_") and name.endswith("_flags") and flags:
            theirs = getattr(above, name, None)
            if theirs:
                theirs[-1] = flags.pop()

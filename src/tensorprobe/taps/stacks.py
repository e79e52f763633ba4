"""The user's stack at a call, without frames of torch and of this tool. Each distinct stack is sent once per step."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from tensorprobe.fast import fast
from tensorprobe.model.sink import Sink
from tensorprobe.taps.sites import is_call

_NOTEBOOK = ("IPython", "ipykernel", "traitlets", "tornado", "asyncio", "runpy")


def _notebook() -> list[str]:
    """Return the folder of the notebook's machinery below its cells, in a notebook."""
    kernel = sys.modules.get("ipykernel")
    if kernel is None or kernel.__file__ is None:
        return []
    files = [module.__file__ for name in _NOTEBOOK if (module := sys.modules.get(name)) is not None]
    places = [Path(file) for file in files if file] + [Path(kernel.__file__).parents[1] / "ipykernel_launcher.py"]
    return [str(place.parent) + os.sep if place.name == "__init__.py" else str(place) for place in places]


_HIDDEN = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(importlib.util.__file__).parent) + os.sep,
    "<frozen",
    *_notebook(),
)
_MOST_FRAMES = 64

Key = tuple[int, ...] | bytes
"""Code objects, by address, and offsets of instructions: bytes where C walks the stack."""


class OuterStack(NamedTuple):
    """The stack when a module was called. `frame` is the frame of our wrapper, where a walk from inside ends."""

    frame: FrameType
    key: Any


class StackBook:
    """Numbers stacks within a step."""

    def __init__(self) -> None:
        self._ids: dict[Key, int] = {}
        self._sent: dict[tuple[tuple[str, int, str], ...], int] = {}
        self._next = 0
        self._shown: dict[int, bool] = {}
        self._codes: list[CodeType] = []  # kept alive, so that no other code object gets the identity of one of them
        self.walker: Any = None if fast is None else fast.walker(FrameType)
        """For C: it has met these codes."""

    def clear(self) -> None:
        """Start a step: stacks that were sent before are sent again."""
        self._ids.clear()
        self._sent.clear()
        self._next = 0

    def current(self, sink: Sink, outer: OuterStack | None) -> int:
        """Return the number of the stack that called torch, and send the stack to the sink if it is new.

        `outer` is the stack of the innermost module call, so that frames above it are not walked again for each op.
        """
        found = self.walk(sys._getframe(2), outer)
        number = self._ids.get(found)
        return self.number(found, sys._getframe(2), sink) if number is None else number

    def number(self, found: Key, frame: FrameType | None, sink: Sink) -> int:
        """Return the number of a stack that was not met in this step. C asks for it, too."""
        frames = _describe(frame, self._shown)
        number = self._sent.get(tuple(frames))  # two calls on one line differ in their instructions only
        if number is None:
            number, self._next = self._next, self._next + 1  # first: if the program interrupts us here, it is not used
            sink.stack(number, frames)
            self._sent[tuple(frames)] = number
        self._ids[found] = number
        return number

    def walk(self, frame: FrameType | None, outer: OuterStack | None) -> Key:
        """Return a stack as identities of code objects and instruction offsets. They determine the lines and are cheap to read.

        A code object is never used as a key itself: its hash covers the whole bytecode and is computed each time.
        """
        if self.walker is not None:
            end, known = (None, b"") if outer is None else outer
            key: bytes = fast.walk(self.walker, frame, end, known, self.meet)  # type: ignore[union-attr]
            return key
        return self._walk(frame, outer)

    def _walk(self, frame: FrameType | None, outer: OuterStack | None) -> tuple[int, ...]:
        shown = self._shown
        key: list[int] = []
        end = None if outer is None else outer.frame
        while frame is not None:
            if frame is end:
                return (*key, *outer.key)  # type: ignore[union-attr]
            code = id(frame.f_code)
            show = shown.get(code)
            if show is None:
                show = self.meet(frame.f_code)
            if show:
                key.append(code)
                key.append(frame.f_lasti)
            frame = frame.f_back
        return tuple(key)

    def meet(self, code: CodeType) -> bool:
        """Return whether frames of this code, which was not met before, are shown."""
        self._codes.append(code)
        show = self._shown[id(code)] = _is_of_program(code)
        return show


def _is_of_program(code: CodeType) -> bool:
    return not code.co_filename.startswith(_HIDDEN) and not is_call(code)


def user_frame(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return file, line and function of the user's innermost frame, from this one on."""
    while frame is not None:
        code = frame.f_code
        if _is_of_program(code):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def user_frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of all the user's frames, innermost first."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        if _is_of_program(frame.f_code):
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _describe(frame: FrameType | None, shown: dict[int, bool]) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame that is shown, innermost first."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        if shown.get(id(frame.f_code)):
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames

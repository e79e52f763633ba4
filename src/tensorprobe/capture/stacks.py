"""The user's stack at a call: torch's and our own frames left out, each distinct stack sent once a step."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from tensorprobe.record.writer import RunWriter

_HIDDEN = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(importlib.util.__file__).parent) + os.sep,
    "<frozen",
)
_MOST_FRAMES = 64


class StackBook:
    """Numbers stacks within a step."""

    def __init__(self) -> None:
        self._ids: dict[tuple[CodeType | int, ...], int] = {}
        self._shown: dict[CodeType, bool] = {}

    def clear(self) -> None:
        """Start a step: what was sent before will be sent again."""
        self._ids.clear()

    def current(self, writer: RunWriter) -> int:
        """The number of the stack of whoever called torch, sent to the recorder if it is new."""
        shown = self._shown
        key: list[CodeType | int] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            show = shown.get(code)
            if show is None:
                show = shown[code] = not code.co_filename.startswith(_HIDDEN)
            if show:
                key.append(code)
                key.append(frame.f_lasti)  # the instruction tells the line, and is twenty times cheaper to ask for
            frame = frame.f_back
        found = tuple(key)
        number = self._ids.get(found)
        if number is None:
            number = self._ids[found] = len(self._ids)
            writer.stack(number, _describe(sys._getframe(1), shown))
        return number


def _describe(frame: FrameType | None, shown: dict[CodeType, bool]) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that is shown, innermost first."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        if shown.get(frame.f_code):
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames

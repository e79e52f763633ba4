"""A stack.json by itself, in both of its forms: the stack of each call by name."""

from __future__ import annotations

from pathlib import Path

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.msprobe_json import read_stacks
from tensorprobe.legacy.layouts.msprobe_segment import frames_of


class StackFile:
    """The stacks of a file that need not stand beside its dump; RunDamaged when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers, frames = read_stacks(path.parent, (path.name,))
        if isinstance(frames, RunDamaged):
            raise frames
        self._frames = frames
        self._known: dict[int, str] = {}

    def of(self, call: str, _: int | None) -> str:
        """The stack of a call on one line, innermost frame first; empty when there is none."""
        number = self._numbers.get(call)
        if number is None:
            return ""
        if number not in self._known:
            self._known[number] = " <- ".join(map(str, frames_of(self._frames[number], self._path, number)))
        return self._known[number]

"""The lines of the user's program around a frame of a recorded stack."""

from __future__ import annotations

from pathlib import Path

from tensorprobe.errors import FileRefused
from tensorprobe.files import read_file
from tensorprobe.model import Frame
from tensorprobe.model.diff import SourceLines

_AROUND = 6
_MOST_BYTES = 2 << 20


def source_lines(frame: Frame) -> SourceLines:
    """Return the lines of the file around a frame, if it still holds the recorded line there; else that line alone.

    The path comes from a run. So nothing but a Python file is read, and only if it holds what was recorded.
    """
    first, text = _around(frame)
    return SourceLines(file=frame.file, line=frame.line, function=frame.function, first=first, text=text)


def _around(frame: Frame) -> tuple[int, list[str]]:
    alone = (frame.line, [frame.code])
    path = Path(frame.file)
    if not frame.code.strip() or path.suffix != ".py":
        return alone
    try:
        lines = read_file(path, limit=_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, FileRefused, ValueError):
        return alone
    if not 0 < frame.line <= len(lines) or lines[frame.line - 1].strip() != frame.code.strip():
        return alone
    first = max(1, frame.line - _AROUND)
    return first, lines[first - 1 : frame.line + _AROUND]

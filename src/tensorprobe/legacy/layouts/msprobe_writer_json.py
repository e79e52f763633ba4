"""JSON objects that grow in a file and are whole after every write: new entries and the closing braces go in one write.

Infinities are written as 1e999, which is JSON, and which Python and the published msprobe read as infinity; NaN, for which
JSON has no number, is the string "NaN", which the published `msprobe compare` takes for one. A string "Infinity" it would
take for a text, and "-Infinity" it refuses.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.forms import MSPROBE_VALUES, MsprobeForm

_encode = msgspec.json.Encoder().encode
_TAIL = b"\n}\n"
_INFINITY, _MINUS_INFINITY = msgspec.Raw(b"1e999"), msgspec.Raw(b"-1e999")


def as_number(value: float) -> Any:
    """What stands for a number, whichever it is."""
    if value - value == 0:
        return value
    return "NaN" if value != value else _INFINITY if value > 0 else _MINUS_INFINITY


def object_text(entries: dict[str, Any]) -> bytes:
    """The text of a whole object, to which a GrowingObject can add."""
    return b"{" + b",".join(_line(key, value) for key, value in entries.items()) + _TAIL


def _line(key: str, value: Any) -> bytes:
    return b"\n %b: %b" % (_encode(key), _encode(value))


class GrowingObject:
    """An object in the file at `path`, or at the end of one: `head` comes before its entries, `tail` closes everything.

    What is in the file is kept, and must be such an object. Nothing is written before `flush`. OSError as the disk gives
    it: the file is whole then, and without the entries that were to be written.
    """

    def __init__(self, path: Path, head: bytes = b"{", tail: bytes = _TAIL) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._tail = tail
        self._waiting: list[bytes] = []
        try:
            size = os.fstat(self._fd).st_size
            if not size:
                os.pwrite(self._fd, head + tail, 0)
                size = len(head) + len(tail)
            self._end = size - len(tail)
            if self._end < 1 or os.pread(self._fd, len(tail), self._end) != tail:
                raise RunDamaged(f"'{path}' was changed since it was written; nothing can be added to it.")
            self._is_empty = os.pread(self._fd, 1, self._end - 1) == b"{"
        except BaseException:
            os.close(self._fd)
            raise

    def add(self, key: str, value: Any) -> None:
        """An entry, whose key the object must not have yet."""
        self._waiting.append(_line(key, value))

    def flush(self) -> None:
        """Write what was added."""
        if not self._waiting:
            return
        entries, self._waiting = b",".join(self._waiting), []
        data = entries + self._tail if self._is_empty else b"," + entries + self._tail
        try:
            if os.pwrite(self._fd, data, self._end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # told by the one that is raised
                os.pwrite(self._fd, self._tail, self._end)
                os.ftruncate(self._fd, self._end + len(self._tail))
            raise
        self._end += len(data) - len(self._tail)
        self._is_empty = False

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)


def open_dump(form: MsprobeForm) -> GrowingObject:
    """The object of the calls, in a file that says before it what was dumped, and where the values are."""
    folder = Path(form.folder)
    head = {
        "task": form.task,
        "level": form.level,
        "framework": "pytorch",
        "dump_data_dir": None if form.values is None else str(folder.absolute() / MSPROBE_VALUES),
    }
    return GrowingObject(folder / form.index, _encode(head)[:-1] + b',"data":{', b"\n}}\n")

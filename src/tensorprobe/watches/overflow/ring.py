"""The last calls of a rank, in a file that survives the process.

Each call is a row of fixed size in a memory-mapped file, so a killed process loses nothing. Names are in a second file, each once.
`read_ring` returns the calls as lines, oldest first.
"""

from __future__ import annotations

import struct
from pathlib import Path

from tensorprobe.errors import FileRefused
from tensorprobe.files import read_file
from tensorprobe.record.ring import Mapping

_ROW = struct.Struct("<QdIIIII4x")
"""Sequence number, greatest magnitude, step, number of the call, of its op's name, of its module's path, backward."""
_HEAD = struct.Struct("<8sI4x")
_MAGIC = b"tpring01"


class RingFile:
    """Rows of the last calls, in a file or, without a path, in memory. `put` is called once for each call."""

    def __init__(self, path: Path | None, rows: int) -> None:
        self._rows = rows
        empty = _HEAD.pack(_MAGIC, rows) + bytes(_ROW.size * rows)
        self._names: Path | None = None
        """Opened for each name: a program may close a descriptor of ours, and get its number for a file of its own."""
        self._shared: Mapping | None = None
        self._map: bytearray | memoryview = bytearray(empty)
        if path is not None:
            path.write_bytes(empty)
            with path.open("r+b") as file:
                self._shared = Mapping(file.fileno(), len(empty))
            self._map = self._shared.bytes
            self._names = path.with_name(f"{path.name}.names")
            self._names.write_bytes(b"")
        self._numbers: dict[str, int] = {}
        self._sequence = 0

    def put(self, op: str, number: int, module: str, step: int, greatest: float, backward: bool) -> None:
        """Add a call that has ended."""
        self._sequence = sequence = self._sequence + 1
        numbers = self._numbers
        _ROW.pack_into(
            self._map,
            _HEAD.size + sequence % self._rows * _ROW.size,
            sequence,
            greatest,
            step,
            number,
            numbers[op] if op in numbers else self._name(op),
            numbers[module] if module in numbers else self._name(module),
            backward,
        )

    def lines(self) -> list[str]:
        """Return the calls as text, oldest first."""
        return _lines(bytes(self._map), list(self._numbers))

    def close(self) -> None:
        """Leave the files on disk."""
        shared, self._shared, self._map = self._shared, None, bytearray(bytes(self._map))
        if shared is not None:
            shared.close()

    def _name(self, text: str) -> int:
        """Return the number of a name, which is on disk before any row uses it."""
        number = self._numbers[text] = len(self._numbers)
        if self._names is not None:
            with self._names.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text.replace("\n", " ") + "\n")
        return number


def read_ring(path: Path) -> list[str]:
    """Return the last calls from the files that a process left; an empty list if they are missing or damaged."""
    try:
        raw, names = read_file(path), read_file(path.with_name(f"{path.name}.names")).decode("utf-8").split("\n")
    except (OSError, FileRefused, UnicodeDecodeError):
        return []
    return _lines(raw, names)


def _lines(raw: bytes, names: list[str]) -> list[str]:
    if len(raw) < _HEAD.size or _HEAD.unpack_from(raw)[0] != _MAGIC:
        return []
    body = raw[_HEAD.size :]
    rows = [row for row in _ROW.iter_unpack(body[: len(body) // _ROW.size * _ROW.size]) if row[0]]
    found = []
    for _, greatest, step, number, op, module, backward in sorted(rows, key=lambda row: row[0]):
        if op >= len(names) or module >= len(names):
            continue
        inside = f" in module '{names[module]}'" if names[module] else ""
        reach = f", max |x| {greatest:.3g}" if greatest else ""
        found.append(f"step {step} {names[op]}.{number}.{'backward' if backward else 'forward'}{inside}{reach}")
    return found

"""Read JSON lines in blocks, without trusting them.

In: a descriptor. Out: `Line` by `Line`, decoded, with its number and its place. A last line without its end is left
out, as the format demands. A line that cannot be decoded comes out as a `Damage`; the lines after it are still read.
Memory stays within a block and one line: a line of more than `MAX_LINE` bytes is damage, whatever it holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

BLOCK = 1 << 18
MAX_LINE = 16 << 20
MAX_DAMAGED = 1000
"""After this many damaged lines, the rest of a file is not read."""

MAX_NESTING = 100
"""JSON nested deeper than this is refused: callers may walk it recursively."""


JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Everything that decoding hostile JSON can raise."""


class Damage(NamedTuple):
    """One line that breaks the format."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line:,}: {self.reason}"


class Line(NamedTuple):
    """One decoded line: its zero-based number, its start, and its length with the line end."""

    number: int
    start: int
    length: int
    value: Any


def reason_of(error: Exception) -> str:
    """Return why a piece of JSON was refused, in words for a user."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        return f"not JSON ({error})"
    return str(error)


def read_lines(descriptor: int, file: str, decode: Callable[[bytes], Any]) -> Iterator[Line | Damage]:
    """Decode each finished line of the file, and close the descriptor at the end.

    `decode` may raise any of `JSON_ERRORS`, or ValueError with a reason: then that line is a Damage. Reading stops at
    an overlong line and after `MAX_DAMAGED` damaged ones: such a file is no record, and may be endless.
    """
    number = start = damaged = 0
    with os.fdopen(descriptor, "rb", buffering=BLOCK) as content:
        while raw := content.readline(MAX_LINE + 1):
            length = len(raw)
            if length > MAX_LINE:
                yield Damage(file, number + 1, f"longer than {MAX_LINE:,} bytes; the rest of the file was not read")
                return
            if not raw.endswith(b"\n"):
                return
            try:
                value = decode(raw)
            except (*JSON_ERRORS, ValueError) as error:
                yield Damage(file, number + 1, reason_of(error))
                damaged += 1
            else:
                yield Line(number, start, length, value)
            number += 1
            start += length
            if damaged == MAX_DAMAGED:
                yield Damage(file, number + 1, f"not read, after {MAX_DAMAGED:,} damaged lines")
                return


def nesting_exceeds(tree: Any, limit: int) -> bool:
    """Return whether lists and objects are nested deeper than `limit`, without recursion."""
    level = [tree]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, (list, dict))
            for child in (node if isinstance(node, list) else node.values())
        ]
        if not level:
            return False
    return True

"""The header of a `.npy` file, read without evaluating it: what it says is matched, never run.

In: the first bytes of a file. Out: a `Header`, or TensorDamaged. Structured dtypes, text and Python objects, which would be a
pickle, are refused: no tensor has them.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tensorprobe.errors import TensorDamaged
from tensorprobe.record.elements import MAX_DIMENSIONS

MAGIC = b"\x93NUMPY"
LONGEST = 10_000
"""Bytes of a header; numpy itself refuses longer ones."""
_USUAL = 128
"""The length of nearly every header: numpy pads them to a multiple of 64."""
_MOST_KNOWN = 4096
_LARGEST = 2**63 - 1

_TEXT = re.compile(
    rb"\s*\{\s*'descr'\s*:\s*'([^'\\]{1,16})'\s*,\s*'fortran_order'\s*:\s*(True|False)\s*,"
    rb"\s*'shape'\s*:\s*\(((?:\s*[0-9]{1,19}L?\s*,)*\s*(?:[0-9]{1,19}L?)?)\s*\)\s*,?\s*\}\s*"
)
_DESCR = re.compile(r"([<>|=]?)(b1|[iu][1248]|f[248]|c8|c16)")


class Header(NamedTuple):
    """What a file says of itself: element type as numpy writes it without its byte order, and where the values are."""

    kind: str
    """`f4`, `i8`, `b1`, …"""
    swapped: bool
    """Whether the bytes of an element are in big-endian order."""
    fortran: bool
    shape: tuple[int, ...]
    start: int
    """Where the values begin."""
    end: int
    """How long the file must be."""


class HeaderReader:
    """Reads headers, each distinct one once: a dump has thousands of files and few shapes."""

    def __init__(self) -> None:
        self._known: dict[bytes, Header] = {}

    def read(self, start: bytes | memoryview, size: int) -> Header:
        """The header in `start`, the first `LONGEST` bytes of a file of `size` bytes, or all of it."""
        header = self._known.get(bytes(start[:_USUAL])) or self._read_unusual(start)
        if size != header.end:
            values = header.end - header.start
            held = max(size - header.start, 0)
            why = ". The disk may have filled during the dump" if held < values else ""
            raise TensorDamaged(
                f"its file has {held:,} bytes of values; {header.kind} {list(header.shape)} has {values:,}{why}"
            )
        return header

    def _read_unusual(self, start: bytes | memoryview) -> Header:
        """A header of another length, or one that is met for the first time."""
        length = header_length(start)
        if length > LONGEST:
            raise TensorDamaged(f"its file has a header of {length:,} bytes; numpy reads up to {LONGEST:,}")
        raw = bytes(start[:length])
        header = self._known.get(raw)
        if header is None:
            header = parse_header(raw, length)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[raw] = header
        return header


def header_length(start: bytes | memoryview) -> int:
    """The length of the header with all that stands before it."""
    if bytes(start[:6]) != MAGIC or len(start) < 12:
        raise TensorDamaged("its file is not a .npy file")
    if start[6] == 1:
        return 10 + int.from_bytes(start[8:10], "little")
    if start[6] in (2, 3):
        return 12 + int.from_bytes(start[8:12], "little")
    raise TensorDamaged(f"its file is a .npy of version {start[6]}, which is unknown")


def parse_header(raw: bytes, length: int) -> Header:
    """The parts of a header that stands whole in `raw`."""
    match = _TEXT.fullmatch(raw, 10 if raw[6] == 1 else 12)
    if match is None or len(raw) < length:
        if b"'|O" in raw:
            raise TensorDamaged("its file holds Python objects, which is a pickle; those are never loaded")
        raise TensorDamaged("its file has a header that numpy does not write for a tensor")
    descr, shape = match[1].decode("latin-1"), tuple(int(size.rstrip(b"L ")) for size in _sizes(match[3]))
    kind = _DESCR.fullmatch(descr)
    if kind is None:
        if descr.startswith("|O"):
            raise TensorDamaged("its file holds Python objects, which is a pickle; those are never loaded")
        raise TensorDamaged(f"its file holds elements of type {descr!r}, which no tensor has")
    count = math.prod(shape)
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) > _LARGEST or count * 16 > _LARGEST:
        raise TensorDamaged("its file has an impossible shape")
    nbytes = count * int(kind[2][1:])
    return Header(kind[2], kind[1] == ">", match[2] == b"True", shape, length, length + nbytes)


def _sizes(text: bytes) -> list[bytes]:
    return [size.strip() for size in text.split(b",") if size.strip()]

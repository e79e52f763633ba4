"""A file of `torch.save` with one plain tensor, without torch: what comes before the bytes of its values, and after.

The file is a zip whose files are stored as they are. The description of the tensor comes first, its bytes last, at a
multiple of 64 or of a page, so that both can be mapped. Nothing is loaded here: the text of the description is put
together from parts that are known.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tensorprobe.legacy.layouts.pt_format import STORAGES
from tensorprobe.model import DTYPES

MOST_BYTES = (1 << 32) - (1 << 20)
"""A plain zip has no place for more."""

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_CRC_IN_LOCAL, _CRC_IN_ENTRY = 14, 16
_FILLING = struct.Struct("<2sH")
_VERSION = 20
_DAY = 33
"""The first day of 1980, from which a zip counts: the same tensor makes the same file."""
_FOLDER = b"archive/"
_VALUES = _FOLDER + b"data/0"


class PtFrame(NamedTuple):
    """The bytes around the values of one tensor: `head` before them, `tail` behind."""

    head: bytes
    tail: bytes


def frame_tensor(dtype: str, shape: Sequence[int], *, checksum: int, multiple: int) -> PtFrame:
    """What stands around values with this CRC-32, which begin at a multiple of `multiple`."""
    head, in_head, tail, in_tail = _frame(dtype, tuple(shape), multiple)
    crc = checksum.to_bytes(4, "little")
    return PtFrame(head[:in_head] + crc + head[in_head + 4 :], tail[:in_tail] + crc + tail[in_tail + 4 :])


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...], multiple: int) -> tuple[bytes, int, bytes, int]:
    """Head and tail, each with the place of the CRC-32, which is not yet there."""
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    parts, entries, at = [], [], 0
    for name, content in _small_files(dtype, shape):
        part = _local(name, len(content), zlib.crc32(content)) + content
        entries.append(_entry(name, len(content), zlib.crc32(content), at))
        parts.append(part)
        at += len(part)
    filled = -(-(at + _LOCAL.size + len(_VALUES)) // multiple) * multiple
    padding = filled - at - _LOCAL.size - len(_VALUES)
    if 0 < padding < _FILLING.size:
        padding, filled = padding + multiple, filled + multiple
    head = b"".join((*parts, _local(_VALUES, nbytes, 0, padding), _filling(padding)))
    last = _entry(_VALUES, nbytes, 0, at)
    directory = b"".join((*entries, last))
    count = len(entries) + 1
    tail = directory + _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), filled + nbytes, 0)
    return head, at + _CRC_IN_LOCAL, tail, len(directory) - len(last) + _CRC_IN_ENTRY


def _small_files(dtype: str, shape: tuple[int, ...]) -> list[tuple[bytes, bytes]]:
    return [
        (_FOLDER + b"data.pkl", _describe(dtype, shape)),
        (_FOLDER + b"byteorder", b"little"),
        (_FOLDER + b"version", b"3\n"),
    ]


def _describe(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The tensor in the words of torch: rebuild, from storage 0, with this shape, row by row, without a gradient."""
    count, stride = 1, []
    for size in reversed(shape):
        stride.append(count)
        count *= max(size, 1)
    elements = count if 0 not in shape else 0
    storage = STORAGES.get(dtype)
    kind = "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"
    home, name = ("torch", f"{storage}Storage") if storage else ("torch.storage", "UntypedStorage")
    length = elements if storage else elements * DTYPES[dtype].itemsize
    memo = _Memo()
    text = b"\x80\x02" + memo(f"ctorch._utils\n{kind}\n".encode()) + b"(("
    text += memo(_text("storage")) + memo(f"c{home}\n{name}\n".encode()) + memo(_text("0")) + memo(_text("cpu"))
    text += memo(_integer(length) + b"t") + b"Q" + _integer(0)
    text += memo.tuple(shape) + memo.tuple(stride[::-1])
    text += b"\x89" + memo(b"ccollections\nOrderedDict\n") + memo(b")R")
    if not storage:
        text += memo(f"ctorch\n{dtype}\n".encode())
    return text + memo(b"t") + memo(b"R") + b"."


class _Memo:
    """Numbers what was made, as torch does: a reader may look for exactly that text."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, text: bytes) -> bytes:
        number, self._next = self._next, self._next + 1
        return text + b"q" + bytes([number])

    def tuple(self, sizes: Sequence[int]) -> bytes:
        if not sizes:
            return b")"
        content = b"".join(map(_integer, sizes))
        return self(content + b"\x85\x86\x87"[len(sizes) - 1 :][:1] if len(sizes) < 4 else b"(" + content + b"t")


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _integer(number: int) -> bytes:
    for mark, size, limit in ((b"K", 1, 1 << 8), (b"M", 2, 1 << 16), (b"J", 4, 1 << 31)):
        if number < limit:
            return mark + number.to_bytes(size, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little")


def _local(name: bytes, size: int, checksum: int, padding: int = 0) -> bytes:
    return _LOCAL.pack(b"PK\3\4", _VERSION, 0, 0, 0, _DAY, checksum, size, size, len(name), padding) + name


def _filling(size: int) -> bytes:
    """An extra field of a zip that says nothing, as torch has it there."""
    return (_FILLING.pack(b"FB", size - _FILLING.size) + bytes(size - _FILLING.size)) if size else b""


def _entry(name: bytes, size: int, checksum: int, at: int) -> bytes:
    return (
        _ENTRY.pack(b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, _DAY, checksum, size, size, len(name), 0, 0, 0, 0, 0, at)
        + name
    )

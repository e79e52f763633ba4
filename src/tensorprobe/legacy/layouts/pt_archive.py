"""Where the files inside an archive of `torch.save` lie: a zip whose files are stored as they are, one behind the other.

In: the content of the archive, trusted in nothing. Out: places inside it, or None when it is anything but that plain
form (compressed, encrypted, in parts, of more than 4 GiB): then somebody else must read it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s4x2H8x2L3H8xL")
"""Mark, flags, method, packed and unpacked size, lengths of name, extra and remark, place of the local header."""
_LOCAL = struct.Struct("<4s22x2H")
_STORED = 0
_ENCRYPTED = 1
_MAX_RECORDS = 64


class Record(NamedTuple):
    """Where the content of one file inside an archive lies."""

    start: int
    length: int


def find_records(content: memoryview, wanted: Callable[[bytes], bool]) -> dict[bytes, Record] | None:
    """Names that are wanted, without the folder that all of them are in → places."""
    directory = _find_directory(content)
    if directory is None:
        return None
    records: dict[bytes, Record] = {}
    start, end, count = directory
    at, size = start, _ENTRY.size
    for _ in range(count):
        if at + size > end:
            return None
        mark, flags, method, packed, length, name_length, extra, remark, header = _ENTRY.unpack_from(content, at)
        if mark != b"PK\1\2" or method != _STORED or flags & _ENCRYPTED or packed != length:
            return None
        name = bytes(content[at + size : at + size + name_length]).partition(b"/")[2]
        if wanted(name):
            place = _behind_header(content, header, start)
            if place is None or place + length > start:
                return None
            records[name] = Record(place, length)
        at += size + name_length + extra + remark
    return records


def _find_directory(content: memoryview) -> tuple[int, int, int] | None:
    """Start and end of the directory of the archive, and how many entries it has."""
    size = len(content)
    if size < _END.size:
        return None
    mark, disk, first_disk, here, count, length, start, remark = _END.unpack_from(content, size - _END.size)
    if mark != b"PK\5\6" or disk or first_disk or remark or here != count or count > _MAX_RECORDS:
        return None
    return (start, start + length, count) if start + length <= size - _END.size else None


def _behind_header(content: memoryview, header: int, limit: int) -> int | None:
    """Where the content behind a local header begins."""
    if header + _LOCAL.size > limit:
        return None
    mark, name_length, extra = _LOCAL.unpack_from(content, header)
    return header + _LOCAL.size + int(name_length) + int(extra) if mark == b"PK\3\4" else None

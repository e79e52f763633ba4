"""Memory for one file's content each, made so that large ones can go to the disk past the page cache.

Fresh pages cost more than the copy into them, and so do fresh pages of the cache: rooms that were given back are used
again, and a file of a megabyte or more is written from a room that begins at a page, with room for its header before it.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from tensorprobe.record.step_files import write_all

PAGE = 4096
LARGE = 1 << 20
_MOST_SPARE_BYTES = 512 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that cannot write past the cache, or cannot reserve."""


class Room:
    """`view` are the bytes of the content. A large one has a page for the header before them."""

    __slots__ = ("_memory", "nbytes", "view")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        head = PAGE if nbytes >= LARGE else 0
        self._memory = mmap.mmap(-1, head + _whole_pages(nbytes)) if head else bytearray(nbytes)
        self.view = memoryview(self._memory)[head : head + nbytes]

    def write(self, path: Path, header: bytes, tail: bytes = b"") -> None:
        """The file with this header, whose length is `header_room(nbytes)`, the content and the tail. OSError as the disk gives it."""
        if self.nbytes >= LARGE and _DIRECT:
            whole = memoryview(self._memory)
            whole[:PAGE] = header
            if _write_directly(path, whole, PAGE + self.nbytes, tail):
                return
        _write(path, header, self.view, tail)


class Rooms:
    """Rooms by size, given out and taken back."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Room]] = {}
        self._spare_bytes = 0

    def take(self, nbytes: int) -> Room:
        """A room for so many bytes; what is in it is of no meaning."""
        spare = self._spare.get(nbytes)
        if not spare:
            return Room(nbytes)
        self._spare_bytes -= nbytes
        return spare.pop()

    def give_back(self, room: Room) -> None:
        """Nobody looks into it any more."""
        if room.nbytes > _MOST_SPARE_BYTES:
            return
        if self._spare_bytes + room.nbytes > _MOST_SPARE_BYTES:
            self._spare, self._spare_bytes = {}, 0
        self._spare.setdefault(room.nbytes, []).append(room)
        self._spare_bytes += room.nbytes


def header_room(nbytes: int) -> int:
    """A header before so many bytes is filled up to a multiple of this."""
    return PAGE if nbytes >= LARGE else 64


def _write(path: Path, header: bytes, content: memoryview, tail: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        whole = len(header) + len(content) + len(tail)
        if (written := os.writev(fd, [header, content, tail])) < whole:
            write_all(fd, memoryview(b"".join((header, content, tail)))[written:])
    finally:
        os.close(fd)


def _write_directly(path: Path, pages: memoryview, length: int, tail: bytes) -> bool:
    """Whether the file system takes it so. A full disk is told at the first byte."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _DIRECT, 0o644)
    except OSError:
        return False  # opened again in the ordinary way, which tells what is wrong if anything is
    try:
        os.posix_fallocate(fd, 0, len(pages))
        write_all(fd, pages)
        os.ftruncate(fd, length)
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    finally:
        os.close(fd)
    if tail:
        with path.open("ab") as file:
            file.write(tail)
    return True


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE

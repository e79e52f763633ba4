"""Memory for the bytes of tensors between the ring and the file that they are written to.

New pages cost more than the copy into them, and so do new pages of the page cache. Buffers are therefore used again, and
a file of a megabyte or more is written past the cache, from a buffer with a page for the header before the content.
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
"""Errors of a file system that cannot write past the cache, or cannot reserve space."""


class Buffer:
    """Memory for the content of one file, in `view`. A large buffer has a page for the header before it."""

    __slots__ = ("_memory", "nbytes", "view")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        head = PAGE if nbytes >= LARGE else 0
        self._memory = mmap.mmap(-1, head + _whole_pages(nbytes)) if head else bytearray(nbytes)
        self.view = memoryview(self._memory)[head : head + nbytes]

    def write(self, path: Path, header: bytes, tail: bytes = b"") -> None:
        """Write a file: header, content, tail. The header's length is a multiple of `header_multiple(nbytes)`."""
        if self.nbytes >= LARGE and _DIRECT:
            whole = memoryview(self._memory)
            whole[:PAGE] = header
            if _write_directly(path, whole, PAGE + self.nbytes, tail):
                return
        _write(path, header, self.view, tail)


class BufferPool:
    """Buffers that are used again, by size."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Buffer]] = {}
        self._spare_bytes = 0

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of this size. Its content is undefined."""
        spare = self._spare.get(nbytes)
        if not spare:
            return Buffer(nbytes)
        self._spare_bytes -= nbytes
        return spare.pop()

    def give_back(self, buffer: Buffer) -> None:
        """Keep the buffer for the next `take`."""
        if buffer.nbytes > _MOST_SPARE_BYTES:
            return
        if self._spare_bytes + buffer.nbytes > _MOST_SPARE_BYTES:
            self._spare, self._spare_bytes = {}, 0
        self._spare.setdefault(buffer.nbytes, []).append(buffer)
        self._spare_bytes += buffer.nbytes


def header_multiple(nbytes: int) -> int:
    """Return the multiple that the header of a file with so many bytes of content is padded to."""
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
    """Write past the page cache; False if the file system cannot. A full disk fails at the first byte."""
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


class HeldTensors:
    """Tensors held in memory until the call that names them arrives, by number.

    The interface is that of `TensorStore`, with a number in place of an offset. Without `keep`, no bytes are held.
    """

    def __init__(self, *, keep: bool = True, wants_digest: bool = False) -> None:
        self.wants_digest = wants_digest
        self.pool = BufferPool()
        self._keep = keep
        self._held: dict[int, Buffer] = {}
        self._pieces = bytearray()
        self._next = 0

    def store(self, data: memoryview, digest: str) -> int | None:
        """Copy the bytes and return their number."""
        if not self._keep:
            return None
        buffer = self.pool.take(len(data))
        buffer.view[:] = data
        number, self._next = self._next, self._next + 1
        self._held[number] = buffer
        return number

    def begin(self) -> int:
        """Start a tensor that comes in pieces."""
        self._pieces = bytearray()
        return self._next

    def extend(self, data: memoryview) -> None:
        """Add a piece to the tensor that was begun."""
        if self._keep:
            self._pieces += data

    def end(self, number: int | None, digest: str, nbytes: int) -> int | None:
        """Finish the tensor that came in pieces and return its number."""
        pieces, self._pieces = self._pieces, bytearray()
        return self.store(memoryview(pieces), digest)

    def get(self, number: int) -> Buffer:
        """Return the bytes. They are valid until `discard`."""
        return self._held[number]

    def discard(self, number: int | None) -> None:
        """Give the memory of a tensor back."""
        buffer = self._held.pop(number, None) if number is not None else None
        if buffer is not None:
            self.pool.give_back(buffer)

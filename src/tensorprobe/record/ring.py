"""A first-in-first-out space of bytes, shared between the training process and its recorder.

The trainer reserves a place, copies a tensor into it and goes on; the recorder reads the place and gives it back.
Positions only grow; the place in memory is the position modulo the size, and a place never wraps round the end.
How far the recorder has read stands in the first page, so the trainer needs no message back to know what is free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import cast

ALIGNMENT = 64
_HEADER_BYTES = mmap.PAGESIZE
_POPULATE_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23


def _find_madvise() -> Callable[[int, int, int], int] | None:
    """The system's call, or None where there is none. What it answers does not matter: it only saves time."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast(Callable[[int, int, int], int], madvise)


_madvise = _find_madvise()


class Ring:
    """`size_bytes` of shared memory after one page of header. `fd` is -1 where it is not shared with another process."""

    def __init__(self, size_bytes: int, fd: int = -1) -> None:
        self.size_bytes = size_bytes
        self.fd = fd
        if fd == -1:
            self._map = mmap.mmap(-1, _HEADER_BYTES + size_bytes)
        else:
            self._map = mmap.mmap(fd, _HEADER_BYTES + size_bytes, flags=mmap.MAP_SHARED)
        self._bytes = memoryview(self._map)
        self._header = self._bytes[:16].cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + _HEADER_BYTES

    @classmethod
    def shared(cls, size_bytes: int) -> Ring:
        """A ring whose `fd` another process can open; fails with OSError or AttributeError where the system has no memfd."""
        fd = os.memfd_create("tensorprobe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _HEADER_BYTES + size_bytes)
            return cls(size_bytes, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def consumed(self) -> int:
        """The position up to which the recorder has finished reading."""
        return self._header[0]

    @consumed.setter
    def consumed(self, position: int) -> None:
        self._header[0] = position

    @property
    def is_read(self) -> bool:
        """Whether a recorder has begun to read."""
        return bool(self._header[1])

    def begin_reading(self) -> None:
        """Said by the recorder once it is ready."""
        self._header[1] = 1

    def populate(self, start: int, nbytes: int) -> None:
        """Have the system put memory behind a part of the ring now, in one go: a fault for each page as it is touched costs far more."""
        if _madvise is not None:
            for at in range(start, min(start + nbytes, self.size_bytes), _POPULATE_BYTES):
                _madvise(self.address + at, min(_POPULATE_BYTES, self.size_bytes - at), _MADV_POPULATE_WRITE)

    def view(self, position: int, nbytes: int) -> memoryview:
        """The bytes at a position."""
        start = _HEADER_BYTES + position % self.size_bytes
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Give the memory back to the system as soon as nobody looks at it any more."""
        self._header.release()
        self._bytes.release()
        self._map.close()
        if self.fd != -1:
            os.close(self.fd)
            self.fd = -1


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a tensor."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT

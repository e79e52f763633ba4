"""A first-in-first-out space of bytes, shared between the training process and its recorder.

The trainer reserves a place, copies a tensor into it and goes on. The recorder reads the place and frees it. Positions
only grow; the place in memory is the position modulo the size, and a place never wraps round the end. The first page says
how far the recorder has read, so the trainer needs no message back to know what is free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any, cast

from tensorprobe.model.interrupts import let_through
from tensorprobe.record.apart import files_of

ALIGNMENT = 64
_HEADER_BYTES = mmap.PAGESIZE
_POPULATE_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23


def _find(name: str, result: Any, *arguments: Any) -> Callable[..., int] | None:
    """Return a function of the system; None if there is none."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError) as error:
        let_through(error)
        return None
    found.restype, found.argtypes = result, arguments
    return cast(Callable[..., int], found)


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_madvise = _find("madvise", ctypes.c_int, _pointer, _size, ctypes.c_int)
_mmap = _find("mmap", _pointer, _pointer, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _find("munmap", ctypes.c_int, _pointer, _size)
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """Shared memory. Python's own `mmap` would keep a duplicate of the descriptor, under a number that a program may close."""

    def __init__(self, fd: int, nbytes: int) -> None:
        if _mmap is None or _munmap is None:
            raise OSError("this system has no shared memory")
        self._nbytes = nbytes
        self._address: int | None = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
        self.bytes = memoryview((ctypes.c_char * nbytes).from_address(self._address)).cast("B")

    def close(self) -> None:
        """Return the memory to the system: `bytes` must not be used again."""
        address, self._address = self._address, None  # at once: a second time it may be memory of others
        if _munmap is not None and address is not None:
            _munmap(address, self._nbytes)


class Ring:
    """`size_bytes` of memory after one page of header. `fd` is that of shared memory, and may be closed afterwards."""

    def __init__(self, size_bytes: int, fd: int = -1) -> None:
        self.size_bytes = size_bytes
        self.closed = False
        nbytes = _HEADER_BYTES + size_bytes
        self._map = Mapping(fd, nbytes) if fd != -1 else None
        self._bytes = memoryview(mmap.mmap(-1, nbytes)) if self._map is None else self._map.bytes
        self._header = self._bytes[:16].cast("Q")
        self.header_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        """Where `consumed` is, as a number of eight bytes."""
        self.address = self.header_address + _HEADER_BYTES

    @property
    def consumed(self) -> int:
        """The position up to which the recorder has finished reading."""
        return self._header[0]

    @consumed.setter
    def consumed(self, position: int) -> None:
        self._header[0] = position

    @property
    def reader(self) -> int:
        """The process id of the recorder once it reads; 0 before."""
        return self._header[1]

    def begin_reading(self) -> None:
        """Note that the recorder is ready to read."""
        self._header[1] = os.getpid()

    def populate(self, start: int, nbytes: int) -> None:
        """Let the system allocate the memory of a part of the ring in one go: a page fault for each page costs far more."""
        if _madvise is not None:
            for at in range(start, min(start + nbytes, self.size_bytes), _POPULATE_BYTES):
                _madvise(self.address + at, min(_POPULATE_BYTES, self.size_bytes - at), _MADV_POPULATE_WRITE)

    def view(self, position: int, nbytes: int) -> memoryview:
        """Return the bytes at a position."""
        start = _HEADER_BYTES + position % self.size_bytes
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Return the memory to the system as soon as nothing refers to it."""
        self._header.release()
        self._bytes.release()
        if self._map is not None:
            self._map.close()
        self.closed = True


def shared_memory(size_bytes: int) -> int:
    """Return a descriptor of memory for a ring; OSError or AttributeError where the system has none."""
    with files_of(_HEADER_BYTES + size_bytes):
        fd = os.memfd_create("tensorprobe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _HEADER_BYTES + size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return fd


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of a tensor."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT

"""Memory for the content of many files: arenas for small ones, private mappings for large ones.

An arena that was given out is used again only when nobody holds its lease any more: fresh pages cost more than the copy,
and nothing may be written into memory that somebody still reads. A mapping keeps no descriptor open, so that thousands
of tensors can be held at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

from tensorprobe.errors import TensorDamaged
from tensorprobe.model import Slot
from tensorprobe.numerics.address import pinned
from tensorprobe.record.elements import demand_shape

SMALL = 1 << 20
"""Files up to this size are read, larger ones are mapped: each is the faster way there."""

ARENA_BYTES = 4 << 20
_ALIGNMENT = 64
_MOST_FREE = 8
"""Arenas that are kept for later; what comes back beyond that is given up."""


def fill(descriptor: int, room: memoryview) -> None:
    """Read a whole file into `room`, which has its size; TensorDamaged when that fails."""
    try:
        done = os.readv(descriptor, [room]) if len(room) else 0
    except OSError as error:
        raise TensorDamaged(f"its file cannot be read: {error.strerror}") from None
    if done != len(room):
        raise TensorDamaged(f"its file became shorter while it was read: {done:,} bytes of {len(room):,}")


def map_file(descriptor: int, size: int) -> Mapping:
    """A file in memory; TensorDamaged when it cannot be mapped."""
    try:
        return Mapping(descriptor, size)
    except (OSError, ValueError, OverflowError) as error:
        raise TensorDamaged(f"its file of {size:,} bytes cannot be mapped: {error}") from error


class Demands:
    """How many bytes slots must have; each kind of tensor is worked out once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}

    def of(self, slot: Slot) -> int:
        """The bytes of `slot`; TensorDamaged when it describes no tensor that has a file."""
        kind = (slot.dtype, slot.shape)
        demanded = self._known.get(kind, -1)
        if demanded < 0:
            demanded = self._known[kind] = demand_shape(slot)
        if slot.offset is None:
            raise TensorDamaged("it has no file")
        if slot.nbytes != demanded:
            raise TensorDamaged(f"it declares {slot.nbytes:,} bytes; {slot.dtype} {list(slot.shape)} has {demanded:,}")
        return demanded


class _Arena:
    """A block of memory that does not move."""

    def __init__(self) -> None:
        memory = bytearray(ARENA_BYTES + _ALIGNMENT)
        with pinned(memory) as (address, _):
            start = -address % _ALIGNMENT
        self.address = address + start
        self.view = memoryview(memory)[start:]


class _Lease:
    """Who holds this may read the arena; when the last holder lets go, the arena is free."""

    __slots__ = ("_arena", "_free")

    def __init__(self, arena: _Arena, free: list[_Arena]) -> None:
        self._arena, self._free = arena, free

    def __del__(self) -> None:
        if len(self._free) < _MOST_FREE:
            self._free.append(self._arena)


class ArenaPool:
    """Room for small files, one behind the other."""

    def __init__(self) -> None:
        self._free: list[_Arena] = []
        self._arena: _Arena | None = None
        self._lease: _Lease | None = None
        self._used = ARENA_BYTES

    def take(self, nbytes: int) -> tuple[int, memoryview, object]:
        """Address and view of so many bytes, at most ARENA_BYTES, and what must be kept while they are used."""
        if self._arena is None or self._used + nbytes > ARENA_BYTES:
            self._lease = None  # before the search: when nobody else holds it, the same arena is free again
            self._arena = self._free.pop() if self._free else _Arena()
            self._lease = _Lease(self._arena, self._free)
            self._used = 0
        start = self._used
        self._used += nbytes + -nbytes % _ALIGNMENT
        return self._arena.address + start, self._arena.view[start : start + nbytes], self._lease


class Mapping:
    """A file in memory, privately: writing into it changes neither the file nor another mapping."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.address, self._held = _map(descriptor, size)
        self._size = size

    def __del__(self) -> None:
        if _libc is not None and self.__dict__.get("_held") is None and "address" in self.__dict__:
            _libc.munmap(self.address, self._size)

    def view(self, start: int, nbytes: int) -> memoryview:
        """Some of its bytes; the view keeps the mapping alive."""
        block: Any = (ctypes.c_ubyte * nbytes).from_address(self.address + start)
        block.mapping = self
        return memoryview(block).cast("B")


def _map(descriptor: int, size: int) -> tuple[int, mmap.mmap | None]:
    """The address of the mapping; and, where the system's own call is not at hand, the object that keeps it."""
    if _libc is None:
        held = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        with pinned(held) as (address, _):
            return address, held
    # Linux refuses a private mapping larger than memory plus swap, unless it is told to reserve nothing.
    flags = mmap.MAP_PRIVATE | _NORESERVE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, "it cannot be mapped")
    return address, None


_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_libc: Any = None
if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8:
    _libc = ctypes.CDLL(None, use_errno=True)  # a handle of our own: nobody else's argument types reach it
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

"""The files of one folder of a dump, opened by name thousands of times: the way to the folder is gone only once.

In: names from an index that is trusted in nothing. Out: descriptors of regular files in that very folder, or
TensorDamaged with the bare fact. No link is followed below the dump's own folder, and nothing but a file is opened.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import weakref
from pathlib import Path
from typing import Any

from tensorprobe.errors import RunError, TensorDamaged
from tensorprobe.model import Slot
from tensorprobe.numerics.native import pinned
from tensorprobe.record.elements import demand_shape
from tensorprobe.record.files import demand_folder, open_file

_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_LONGEST_SHOWN = 200


class FolderFiles:
    """The folder `root/parts...`. Its descriptor is held until `close`, and is opened again when it is needed again."""

    def __init__(self, root: Path, parts: tuple[str, ...]) -> None:
        self._root, self._parts = root, parts
        self._closing: weakref.finalize[[int], FolderFiles] | None = None
        self._descriptor = -1

    def open(self, name: str) -> tuple[int, int]:
        """A descriptor of the file of that name, and its size."""
        shown = name[:_LONGEST_SHOWN]
        if not _is_plain(name):
            raise TensorDamaged(f"its name {shown!r} is none that a file in the folder can have")
        try:
            if not _RELATIVE:
                descriptor = open_file(self._root, *self._parts, name)
                return descriptor, os.fstat(descriptor).st_size
            folder = self._folder()
            _demand_file(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode, shown)
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            raise TensorDamaged(f"its file '{shown}' is missing") from None
        except TensorDamaged:
            raise
        except (OSError, RunError, ValueError) as error:
            fact = error.strerror if isinstance(error, OSError) else error
            raise TensorDamaged(f"its file '{shown}' cannot be opened: {fact}") from None
        found = os.fstat(descriptor)
        # The name may have been given to something else between the look and the opening.
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise TensorDamaged(f"'{shown}' changed its kind while it was opened")
        return descriptor, found.st_size

    def size_bytes(self) -> int:
        """How many bytes the files of the folder take; 0 when there is no such folder."""
        try:
            with os.scandir(self._folder() if _RELATIVE else self._root.joinpath(*self._parts)) as entries:
                return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Give the descriptor of the folder back."""
        if self._closing is not None:
            self._closing()
        self._closing, self._descriptor = None, -1

    def _folder(self) -> int:
        if self._closing is None:
            demand_folder(self._root, *self._parts)  # says in words what is wrong with it
            descriptor = os.open(self._root, _FOLDER_FLAGS)
            for part in self._parts:
                try:
                    below = os.open(part, _FOLDER_FLAGS | getattr(os, "O_NOFOLLOW", 0), dir_fd=descriptor)
                finally:
                    os.close(descriptor)
                descriptor = below
            self._descriptor = descriptor
            self._closing = weakref.finalize(self, os.close, descriptor)
        return self._descriptor


def _demand_file(mode: int, name: str) -> None:
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a special file"
        raise TensorDamaged(f"its file '{name}' is {what}. It was not opened: a dump may not point outside itself")


def _is_plain(name: str) -> bool:
    """Whether it names something in the folder, and nothing above, below or beside it."""
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


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

"""Values in `.npy` files, one for each tensor, as the older tools leave them: a `ByteSource` for the readers of their dumps.

In: slots, whose `offset` is the number by which their file is known, and a folder of files that is trusted in nothing.
Out: exactly the bytes that the slot's own dtype and shape demand, row-major and little-endian, or TensorDamaged. What
was widened to be stored (bfloat16 as float32) is narrowed back, and only if no value changes by that.
Nothing is evaluated or unpickled, no link is followed, and memory that somebody still holds is never written to again.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from tensorprobe.errors import TensorDamaged
from tensorprobe.model import Slot
from tensorprobe.numerics.address import pinned
from tensorprobe.record.elements import demand_shape
from tensorprobe.record.files import demand_folder, open_file
from tensorprobe.record.layouts.file_memory import ArenaPool, Mapping
from tensorprobe.record.layouts.npy_header import LONGEST, Header, HeaderReader
from tensorprobe.record.layouts.npy_values import convert, is_stored_as

SMALL = 1 << 20
"""Files up to this size are read, larger ones are mapped: each is the faster way there."""

_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_FILE_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class NpySource:
    """The files of the folder `root/folder...`; `name_of` gives the name of the file of a slot's number.

    The folder `root` may be a link, for the user chose it; below it nothing may be one.
    """

    def __init__(self, root: Path, folder: tuple[str, ...], name_of: Callable[[int], str]) -> None:
        self._root, self._parts, self._name_of = root, folder, name_of
        self._descriptor: int | None = None
        self._demanded: dict[tuple[str, tuple[int, ...]], int] = {}
        self._headers = HeaderReader()
        self._arenas = ArenaPool()

    def read(self, slot: Slot) -> memoryview:
        """The bytes of `slot`, in memory that is the caller's alone."""
        if not self._demand(slot):
            return memoryview(bytearray())
        descriptor, size = self._open(slot)
        try:
            if size > SMALL:
                return self._values(slot, self._map(descriptor, size).view, *self._look(descriptor, size))
            content = memoryview(bytearray(size))
            self._fill(descriptor, content)
        finally:
            os.close(descriptor)
        return self._values(slot, lambda start, nbytes: content[start : start + nbytes], content, size)

    def hold(self, slot: Slot) -> tuple[int, object]:
        """The address of the bytes of `slot`, and what must outlive their use."""
        if not self._demand(slot):
            return 0, None
        descriptor, size = self._open(slot)
        try:
            if size > SMALL:
                header = self._header(slot, *self._look(descriptor, size))
                mapping = self._map(descriptor, size)
                if is_stored_as(header, slot):
                    return mapping.address + header.start, mapping
                return _address(convert(mapping.view(header.start, header.end - header.start), header, slot))
            address, content, lease = self._arenas.take(size)
            self._fill(descriptor, content)
        finally:
            os.close(descriptor)
        header = self._header(slot, content, size)
        if is_stored_as(header, slot):
            return address + header.start, lease
        return _address(convert(content[header.start :], header, slot))

    def size_bytes(self) -> int:
        """How many bytes the files of the folder take."""
        total = 0
        with os.scandir(self._folder() if _RELATIVE else self._root.joinpath(*self._parts)) as entries:
            for entry in entries:
                if entry.name.endswith(".npy") and entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
        return total

    def _values(
        self, slot: Slot, view: Callable[[int, int], memoryview], start: bytes | memoryview, size: int
    ) -> memoryview:
        header = self._header(slot, start, size)
        content = view(header.start, header.end - header.start)
        return content if is_stored_as(header, slot) else convert(content, header, slot)

    def _demand(self, slot: Slot) -> int:
        """How many bytes the slot must have; TensorDamaged when it describes no tensor."""
        kind = (slot.dtype, slot.shape)
        demanded = self._demanded.get(kind, -1)
        if demanded < 0:
            demanded = self._demanded[kind] = demand_shape(slot)
        if slot.offset is None:
            raise TensorDamaged("it has no file")
        if slot.nbytes != demanded:
            shape = list(slot.shape)
            raise TensorDamaged(f"it declares {slot.nbytes:,} bytes; {slot.dtype} {shape} has {demanded:,}")
        return demanded

    def _header(self, slot: Slot, start: bytes | memoryview, size: int) -> Header:
        header = self._headers.read(start, size)
        if header.shape != slot.shape:
            raise TensorDamaged(f"its file holds the shape {list(header.shape)}, its line says {list(slot.shape)}")
        return header

    def _open(self, slot: Slot) -> tuple[int, int]:
        """A descriptor of the file of the slot, and its size."""
        assert slot.offset is not None
        name = self._name_of(slot.offset)
        if "/" in name or "\0" in name or os.sep in name or name in (".", ".."):
            raise TensorDamaged(f"its name {name[:80]!r} is none that a file in the folder can have")
        try:
            if not _RELATIVE:
                descriptor = open_file(self._root, *self._parts, name)
                return descriptor, os.fstat(descriptor).st_size
            folder = self._folder()
            _demand_file(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode, name)
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            raise TensorDamaged(f"the file '{self._path(name)}' is missing") from None
        except (OSError, ValueError) as error:
            fact = error.strerror if isinstance(error, OSError) else error
            raise TensorDamaged(f"the file '{self._path(name)[:500]}' cannot be opened: {fact}") from None
        # The name may have been given to something else between the look and the opening.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise TensorDamaged(f"the file '{self._path(name)}' changed its kind while it was opened")
        return descriptor, found.st_size

    def _path(self, name: str) -> str:
        return str(self._root.joinpath(*self._parts, name))

    def _folder(self) -> int:
        """A descriptor of the folder, which stays open as long as the source lives."""
        if self._descriptor is None:
            demand_folder(self._root, *self._parts)  # says in words what is wrong with it
            descriptor = os.open(self._root, _FOLDER_FLAGS)
            for part in self._parts:
                try:
                    below = os.open(part, _FOLDER_FLAGS | _NO_LINK, dir_fd=descriptor)
                finally:
                    os.close(descriptor)
                descriptor = below
            self._descriptor = descriptor
            weakref.finalize(self, os.close, descriptor)
        return self._descriptor

    def _look(self, descriptor: int, size: int) -> tuple[bytes, int]:
        """The beginning of a file, and its size."""
        return os.pread(descriptor, LONGEST, 0), size

    def _map(self, descriptor: int, size: int) -> Mapping:
        try:
            return Mapping(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise TensorDamaged(f"its file of {size:,} bytes cannot be mapped: {error}") from error

    def _fill(self, descriptor: int, room: memoryview) -> None:
        """Read the whole file into `room`."""
        try:
            done = os.readv(descriptor, [room]) if len(room) else 0
        except OSError as error:
            raise TensorDamaged(f"its file cannot be read: {error.strerror}") from None
        if done != len(room):
            raise TensorDamaged(f"its file became shorter while it was read: {done:,} bytes of {len(room):,}")


def _address(content: object) -> tuple[int, object]:
    with pinned(content) as (address, _):
        return address, content


def _demand_file(mode: int, name: str) -> None:
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a special file"
        raise TensorDamaged(
            f"its file '{name[:200]}' is {what}. It was not opened: a dump may not point outside itself"
        )

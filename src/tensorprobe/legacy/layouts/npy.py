"""Values in `.npy` files, one for each tensor, as the older tools leave them: a `ByteSource` for the readers of their dumps.

In: slots, whose `offset` is the number by which their file is known, and a folder of files that is trusted in nothing.
Out: exactly the bytes that the slot's own dtype and shape demand, row-major and little-endian, or TensorDamaged. What
was widened to be stored (bfloat16 as float32) is narrowed back, and only if no value changes by that.
Nothing is evaluated or unpickled, no link is followed, and memory that somebody still holds is never written to again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.file_memory import SMALL, ArenaPool, Demands, fill, map_file
from tensorprobe.legacy.layouts.folder_files import FolderFiles
from tensorprobe.legacy.layouts.npy_header import LONGEST, Header, HeaderReader
from tensorprobe.legacy.layouts.npy_values import convert, is_stored_as
from tensorprobe.model import Slot
from tensorprobe.numerics.address import pinned


class NpySource:
    """The files of the folder `root/folder...`; `name_of` gives the name of the file of a slot's number.

    The folder `root` may be a link, for the user chose it; below it nothing may be one.
    """

    def __init__(self, root: Path, folder: tuple[str, ...], name_of: Callable[[int], str]) -> None:
        self._files, self._name_of = FolderFiles(root, folder), name_of
        self._demands = Demands()
        self._headers = HeaderReader()
        self._arenas = ArenaPool()

    def read(self, slot: Slot) -> memoryview:
        """The bytes of `slot`, in memory that is the caller's alone."""
        if not self._demands.of(slot):
            return memoryview(bytearray())
        descriptor, size = self._open(slot)
        try:
            if size > SMALL:
                return self._values(slot, map_file(descriptor, size).view, *self._look(descriptor, size))
            content = memoryview(bytearray(size))
            fill(descriptor, content)
        finally:
            os.close(descriptor)
        return self._values(slot, lambda start, nbytes: content[start : start + nbytes], content, size)

    def hold(self, slot: Slot) -> tuple[int, object]:
        """The address of the bytes of `slot`, and what must outlive their use."""
        if not self._demands.of(slot):
            return 0, None
        descriptor, size = self._open(slot)
        try:
            if size > SMALL:
                header = self._header(slot, *self._look(descriptor, size))
                mapping = map_file(descriptor, size)
                if is_stored_as(header, slot):
                    return mapping.address + header.start, mapping
                return _address(convert(mapping.view(header.start, header.end - header.start), header, slot))
            address, content, lease = self._arenas.take(size)
            fill(descriptor, content)
        finally:
            os.close(descriptor)
        header = self._header(slot, content, size)
        if is_stored_as(header, slot):
            return address + header.start, lease
        return _address(convert(content[header.start :], header, slot))

    def size_bytes(self) -> int:
        """How many bytes the files of the folder take."""
        return self._files.size_bytes()

    def _values(
        self, slot: Slot, view: Callable[[int, int], memoryview], start: bytes | memoryview, size: int
    ) -> memoryview:
        header = self._header(slot, start, size)
        content = view(header.start, header.end - header.start)
        return content if is_stored_as(header, slot) else convert(content, header, slot)

    def _header(self, slot: Slot, start: bytes | memoryview, size: int) -> Header:
        header = self._headers.read(start, size)
        if header.shape != slot.shape:
            raise TensorDamaged(f"its file holds the shape {list(header.shape)}, its line says {list(slot.shape)}")
        return header

    def _open(self, slot: Slot) -> tuple[int, int]:
        """A descriptor of the file of the slot, and its size."""
        assert slot.offset is not None
        return self._files.open(self._name_of(slot.offset))

    def _look(self, descriptor: int, size: int) -> tuple[bytes, int]:
        """The beginning of a file, and its size."""
        return os.pread(descriptor, LONGEST, 0), size


def _address(content: object) -> tuple[int, object]:
    with pinned(content) as (address, _):
        return address, content

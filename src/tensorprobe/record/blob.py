"""`tensors.bin`: the values of one step and rank, mapped into memory when the first value is needed.

In: slots, of which nothing is trusted. Out: a memoryview of exactly the slot's bytes, or TensorDamaged before a byte is
read. The mapping is private: writing into a tensor changes neither the file nor another reader's run. It does change what
the same `Run` reads later, because equal tensors share their bytes. Clone before writing.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tensorprobe.errors import TensorDamaged
from tensorprobe.model import Slot
from tensorprobe.numerics.native import pinned
from tensorprobe.record.elements import demand_shape
from tensorprobe.record.files import open_file

ALIGNMENT = 64
MAX_MAPPED = 32
"""Mappings kept at once by one run. Each costs a file descriptor until its last tensor is gone."""

TRUSTED = 256
"""Addresses that `hold` returns before it checks the length of the file again."""

before_mapping: Callable[[int], None] | None = None
"""Called with the size of each file before it is mapped: what limits the memory of this process has to allow for it."""

# Linux refuses a private mapping larger than memory plus swap, unless asked to reserve nothing.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class ByteSource(Protocol):
    """The values of a step and rank. Each layout of a run on disk implements it."""

    def read(self, slot: Slot) -> memoryview:
        """Return exactly the bytes of `slot`. Raises TensorDamaged with the fact alone; the caller adds the slot."""
        ...

    def hold(self, slot: Slot) -> tuple[int, object]:
        """Return the address of those bytes, and the object that keeps them alive. Raises as `read` does."""
        ...


class MappingPool:
    """The mappings of one run. The least recently used is dropped first, so that few files are open at once."""

    def __init__(self, limit: int = MAX_MAPPED) -> None:
        self._limit = limit
        self._kept: OrderedDict[object, mmap.mmap] = OrderedDict()

    def get(self, key: object, make: Callable[[], mmap.mmap]) -> mmap.mmap:
        """Return the mapping of `key`; make it if it is not in the pool."""
        mapping = self._kept.get(key)
        if mapping is None:
            mapping = self._kept[key] = make()
            if len(self._kept) > self._limit:
                # Not closed: tensors may still use it. It is freed with the last of them.
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return mapping

    def drop(self, key: object) -> None:
        """Forget the mapping of `key`; tensors that use it keep it alive."""
        self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)


class Blob:
    """The `tensors.bin` of one step and rank."""

    def __init__(self, root: Path, folder: tuple[str, ...], pool: MappingPool) -> None:
        self._root = root
        self._parts = (*folder, "tensors.bin")
        self._pool = pool
        self._held: mmap.mmap | None = None
        self._address = self._reach = self._trusted = 0
        self._demanded: dict[tuple[object, ...], int] = {}

    def read(self, slot: Slot) -> memoryview:
        """Return the bytes of `slot`, after every check of the format."""
        demanded, offset = self._check(slot)
        if not demanded:
            return memoryview(bytearray())
        return memoryview(self._mapping(offset + demanded))[offset : offset + demanded]

    def hold(self, slot: Slot) -> tuple[int, object]:
        """Return the address of the bytes of `slot`, after the same checks, and the mapping to keep alive."""
        demanded, offset = self._check(slot)
        if not demanded:
            return 0, None
        if self._trusted and offset + demanded <= self._reach:
            self._trusted -= 1
            return self._address + offset, self._held
        mapping = self._mapping(offset + demanded)
        if self._held is not mapping:
            with pinned(mapping) as (address, _):
                self._held, self._address = mapping, address
        self._reach, self._trusted = min(len(mapping), mapping.size()), TRUSTED
        return self._address + offset, mapping

    def apart(self) -> Blob:
        """Return the same file with a mapping of its own: pages dropped from one mapping stay in the others."""
        return Blob(self._root, self._parts[:-1], MappingPool())

    def _check(self, slot: Slot) -> tuple[int, int]:
        """Return length and offset of the bytes of `slot`; raise TensorDamaged when they are impossible."""
        kind = (slot.dtype, slot.shape, slot.stride)
        demanded = self._demanded.get(kind, -1)
        if demanded < 0:
            demanded = self._demanded[kind] = demand_shape(slot)
        offset = slot.offset
        if offset is None:
            raise TensorDamaged("it has no offset")
        if slot.nbytes != demanded:
            shape = list(slot.shape)
            raise TensorDamaged(f"it declares {slot.nbytes:,} bytes; {slot.dtype} {shape} has {demanded:,}")
        if offset < 0 or offset % ALIGNMENT:
            raise TensorDamaged(f"its offset {offset:,} is not a multiple of {ALIGNMENT}")
        return demanded, offset

    def _mapping(self, end: int) -> mmap.mmap:
        """Return a mapping that reaches `end`. It is made again if the file has grown: the run may still be written."""
        mapping = self._pool.get(self._parts, self._map)
        if end > len(mapping) and mapping.size() > len(mapping):
            self._pool.drop(self._parts)
            mapping = self._pool.get(self._parts, self._map)
        # Checked each time: touching a page that was cut off since would kill the process.
        if end > min(len(mapping), size := mapping.size()):
            raise TensorDamaged(
                f"it ends at byte {end:,}, the file holds {size:,}. The disk may have filled during capture"
            )
        return mapping

    def _map(self) -> mmap.mmap:
        path = self._root.joinpath(*self._parts)
        try:
            descriptor = open_file(self._root, *self._parts)
        except FileNotFoundError:
            raise TensorDamaged(f"the file '{path}' is missing") from None
        try:
            size = os.fstat(descriptor).st_size
            if not size:
                raise TensorDamaged(f"the file '{path}' is empty. The disk may have filled during capture")
            if before_mapping is not None:
                before_mapping(size)
            if _NORESERVE:
                flags = mmap.MAP_PRIVATE | _NORESERVE
                return mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, OverflowError) as error:
            raise TensorDamaged(f"the file '{path}' ({size:,} bytes) cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

"""Values in `.pt` files, one tensor each, as `torch.save` writes them: a `ByteSource` for the readers of dumps.

In: slots, whose `offset` is the number by which their file is known, and a folder that is trusted in nothing.
Out: exactly the bytes that the slot's dtype and shape demand, row-major and little-endian, or TensorDamaged.
Nothing in a file is run, and torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tensorprobe.errors import TensorDamaged
from tensorprobe.files import READ_LIMIT, max_read_bytes
from tensorprobe.legacy.layouts.pt_format import Saved, describe_saved, read_saved
from tensorprobe.legacy.layouts.value_files import SMALL, ArenaPool, Demands, FolderFiles, fill, map_file
from tensorprobe.model import DTYPES, Slot
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.numerics.native import pinned

_RAW = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
"""What numpy moves elements as that it has no type for."""


class PtSource:
    """The `.pt` files of a folder; `name_of` gives the name of the file of a slot's number."""

    def __init__(self, files: FolderFiles, name_of: Callable[[int], str]) -> None:
        self._files, self._name_of = files, name_of
        self._arenas = ArenaPool()
        self._demands = Demands()

    def read(self, slot: Slot) -> memoryview:
        """Return the bytes of `slot`, in memory that is the caller's alone."""
        if not self._demands.of(slot):
            return memoryview(bytearray())
        return _values(self._content(slot, lambda size: memoryview(bytearray(size))), slot)

    def hold(self, slot: Slot) -> tuple[int, object]:
        """Return the address of the bytes of `slot`, and what must outlive their use."""
        if not self._demands.of(slot):
            return 0, None
        leases: list[object] = []
        values = _values(self._content(slot, lambda size: self._room(size, leases)), slot)
        with pinned(values) as (address, _):
            return address, (values, leases)

    def _room(self, size: int, leases: list[object]) -> memoryview:
        _, room, lease = self._arenas.take(size)
        leases.append(lease)
        return room

    def _content(self, slot: Slot, make_room: Callable[[int], memoryview]) -> memoryview:
        """The whole file: in the room that was made for it, or mapped when it is large."""
        assert slot.offset is not None
        descriptor, size = self._files.open(self._name_of(slot.offset))
        try:
            if size < slot.nbytes:
                raise TensorDamaged(f"it has {slot.nbytes:,} bytes, its file has {size:,}")
            if size > SMALL:
                return map_file(descriptor, size).view(0, size)
            room = make_room(size)
            fill(descriptor, room)
            return room
        finally:
            os.close(descriptor)


def read_pt_file(path: Path) -> tuple[memoryview, Slot]:
    """Return the values of the tensor in one file, and a slot that describes them. Fails as `PtSource.read`."""
    files = FolderFiles(path.parent, ())
    try:
        descriptor, size = files.open(path.name)
        try:
            content = map_file(descriptor, size).view(0, size) if size else memoryview(b"")
        finally:
            os.close(descriptor)
    finally:
        files.close()
    dtype, shape = describe_saved(content)
    slot = Slot(name="output.0", dtype=dtype, shape=shape, offset=0)
    return (_values(content, slot) if slot.count else memoryview(bytearray())), slot


def _values(content: memoryview, slot: Slot) -> memoryview:
    """The bytes of the tensor in the file `content`: where they lie in it, or as a copy when they must be rearranged."""
    saved = read_saved(content)
    tensor = saved.tensor
    _demand_same(tensor.dtype, tensor.shape, slot)
    itemsize = DTYPES[tensor.dtype].itemsize
    if not tensor.is_row_major or saved.big_endian:
        return _rearranged(saved, itemsize)
    start = tensor.offset * itemsize
    values = saved.storage[start : start + slot.count * itemsize]
    with pinned(values) as (address, _):
        # torch puts them at a multiple of 64; elsewhere the kernel must not read them.
        return memoryview(bytearray(values)) if address % itemsize else values


def _demand_same(dtype: str, shape: Sequence[int], slot: Slot) -> None:
    if dtype != slot.dtype or tuple(shape) != slot.shape:
        raise TensorDamaged(
            f"its file holds {dtype} {list(shape)}, dump.json says {slot.dtype} {list(slot.shape)}. "
            "Was the file replaced by another dump's?"
        )


def _rearranged(saved: Saved, itemsize: int) -> memoryview:
    """The elements row by row, little-endian, with what is only noted in the description (conj, neg) done."""
    import numpy

    tensor = saved.tensor
    known = NUMPY_NAMES.get(tensor.dtype)
    if known is None and (tensor.negated or tensor.conjugated or tensor.dtype.startswith("complex")):
        raise TensorDamaged(f"its file holds a {tensor.dtype} view that numpy cannot resolve. Save it contiguous")
    kind = numpy.dtype(known or _RAW[itemsize])
    stored = kind.newbyteorder(">") if saved.big_endian else kind
    steps = [step * itemsize if size != 1 else 0 for step, size in zip(tensor.stride, tensor.shape, strict=True)]
    try:
        values = numpy.ndarray(tensor.shape, stored, saved.storage, tensor.offset * itemsize, steps)
    except ValueError as error:
        raise TensorDamaged(f"its file holds a tensor that numpy cannot read: {error}") from None
    if values.nbytes > max(saved.storage.nbytes, max_read_bytes()):
        raise TensorDamaged(
            f"its file repeats {saved.storage.nbytes:,} bytes up to {values.nbytes:,}. If it is sound, allow more: "
            f"{READ_LIMIT}={-(-values.nbytes >> 20)}M"
        )
    made = numpy.array(values, kind, order="C")
    if tensor.conjugated:
        numpy.conjugate(made, out=made)
    if tensor.negated:
        numpy.negative(made, out=made)
    return made.reshape(-1).view(numpy.uint8).data

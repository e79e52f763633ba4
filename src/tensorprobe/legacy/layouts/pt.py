"""Values in `.pt` files, one tensor each, as `torch.save` writes them: a `ByteSource` for the readers of dumps.

In: slots, whose `offset` is the number by which their file is known, and a folder that is trusted in nothing.
Out: exactly the bytes that the slot's dtype and shape demand, row-major and little-endian, or TensorDamaged.
The pickle of a plain tensor is not executed: the one form that `torch.save` gives it is recognised as a text is, and
the bytes are taken from the archive where they lie. What has any other form goes to `torch.load(weights_only=True)`;
torch is imported for that alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.file_memory import SMALL, ArenaPool, Demands, fill, map_file
from tensorprobe.legacy.layouts.folder_files import FolderFiles
from tensorprobe.legacy.layouts.pt_archive import Record, find_records
from tensorprobe.legacy.layouts.pt_pickle import read_plain_tensor
from tensorprobe.model import DTYPES, Slot
from tensorprobe.numerics.address import pinned

_MAX_PICKLE = 4096


class PtSource:
    """The `.pt` files of a folder; `name_of` gives the name of the file of a slot's number."""

    def __init__(self, files: FolderFiles, name_of: Callable[[int], str]) -> None:
        self._files, self._name_of = files, name_of
        self._arenas = ArenaPool()
        self._demands = Demands()

    def read(self, slot: Slot) -> memoryview:
        """The bytes of `slot`, in memory that is the caller's alone."""
        if not self._demands.of(slot):
            return memoryview(bytearray())
        return _values(self._content(slot, lambda size: memoryview(bytearray(size))), slot)

    def hold(self, slot: Slot) -> tuple[int, object]:
        """The address of the bytes of `slot`, and what must outlive their use."""
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


def _values(content: memoryview, slot: Slot) -> memoryview:
    """The bytes of the tensor in the file `content`."""
    plain = _plain_values(content, slot)
    return _loaded_values(content, slot) if plain is None else plain


def _plain_values(content: memoryview, slot: Slot) -> memoryview | None:
    """The bytes of the tensor where they lie in the archive; None when the file has another form than the usual one."""
    records = find_records(content, _is_of_the_tensor)
    pickle = records.get(b"data.pkl") if records else None
    if records is None or pickle is None or pickle.length > _MAX_PICKLE:
        return None
    order = records.get(b"byteorder")
    if order is not None and bytes(_part(content, order)) != b"little":
        return None
    tensor = read_plain_tensor(bytes(_part(content, pickle)))
    storage = records.get(b"data/" + tensor.key) if tensor is not None else None
    if tensor is None or storage is None or not tensor.is_row_major:
        return None
    _demand_same(tensor.dtype, tensor.shape, slot)
    if storage.length != tensor.nbytes or storage.length < slot.nbytes:
        raise TensorDamaged(f"its file holds {storage.length:,} bytes of values; {slot.nbytes:,} are needed")
    values = _part(content, storage)[: slot.nbytes]
    # torch puts them at a multiple of 64; elsewhere the kernel must not read them.
    return memoryview(bytearray(values)) if storage.start % DTYPES[slot.dtype].itemsize else values


def _is_of_the_tensor(name: bytes) -> bool:
    return name.startswith(b"data/") or name in (b"data.pkl", b"byteorder")


def _part(content: memoryview, record: Record) -> memoryview:
    return content[record.start : record.start + record.length]


def _demand_same(dtype: str, shape: Sequence[int], slot: Slot) -> None:
    if dtype != slot.dtype or tuple(shape) != slot.shape:
        raise TensorDamaged(
            f"its file holds {dtype} {list(shape)}, dump.json says {slot.dtype} {list(slot.shape)}. "
            "Was the file replaced by another dump's?"
        )


def _loaded_values(content: memoryview, slot: Slot) -> memoryview:
    """The bytes of a tensor in another form than the usual one, through torch."""
    import io

    import torch

    refuse_packed(content)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # a hostile file can make torch raise nearly anything; all of it means the same to us
        reason = str(error).partition("\n")[0][:200]
        raise TensorDamaged(f"torch.load refuses its file: {reason}") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise TensorDamaged("its file holds something else than a plain tensor")
    _demand_same(str(tensor.dtype).removeprefix("torch."), tensor.shape, slot)
    block = bytearray(slot.nbytes)
    torch.frombuffer(block, dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return memoryview(block)


def refuse_packed(content: memoryview) -> None:
    """A compressed archive may hold a thousand times its size; torch never writes one."""
    import io
    import zipfile

    if bytes(content[:4]) != b"PK\3\4":
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise TensorDamaged(f"its file is not a sound archive: {error}") from None
    if packed:
        raise TensorDamaged("its file is a compressed archive, which torch.save never writes")

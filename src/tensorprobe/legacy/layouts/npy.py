"""Values in `.npy` files, one for each tensor, as the older tools leave them: a `ByteSource` for the readers of their dumps.

In: slots, whose `offset` is the number by which their file is known, and a folder of files that is trusted in nothing.
Out: exactly the bytes that the slot's own dtype and shape demand, row-major and little-endian, or TensorDamaged. What
was widened to be stored (bfloat16 as float32) is narrowed back, and only if no value changes by that.
Nothing is evaluated or unpickled, no link is followed, and memory that somebody still holds is never written to again.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.value_files import SMALL, ArenaPool, Demands, FolderFiles, fill, map_file
from tensorprobe.model import Slot
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.numerics.float8 import NAMES as FLOAT8
from tensorprobe.numerics.float8 import decode_table
from tensorprobe.numerics.native import pinned
from tensorprobe.record.elements import MAX_DIMENSIONS

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]


class NpySource:
    """The files of a folder; `name_of` gives the name of the file of a slot's number."""

    def __init__(self, files: FolderFiles, name_of: Callable[[int], str]) -> None:
        self._files, self._name_of = files, name_of
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

    def _header(self, slot: Slot, start: bytes | memoryview, size: int) -> NpyHeader:
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


LONGEST = 10_000
"""Bytes of a header; numpy itself refuses longer ones."""
_USUAL = 128
"""The length of nearly every header: numpy pads them to a multiple of 64."""
_MOST_KNOWN = 4096
_LARGEST = 2**63 - 1
_ELEMENTS = frozenset("b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split())


class NpyHeader(NamedTuple):
    """What a file says of itself: element type as numpy writes it without its byte order, and where the values are."""

    kind: str
    """`f4`, `i8`, `b1`, …"""
    swapped: bool
    """Whether the bytes of an element are in big-endian order."""
    fortran: bool
    shape: tuple[int, ...]
    start: int
    """Where the values begin."""
    end: int
    """How long the file must be."""


class HeaderReader:
    """Reads headers, each distinct one once: a dump has thousands of files and few shapes."""

    def __init__(self) -> None:
        self._known: dict[bytes, NpyHeader] = {}

    def read(self, start: bytes | memoryview, size: int) -> NpyHeader:
        """Return the header in `start`, the first `LONGEST` bytes of a file of `size` bytes, or all of it."""
        usual = bytes(start[:_USUAL])
        header = self._known.get(usual)
        if header is None:
            header = parse_header(bytes(start[:LONGEST]))
            if header.start == _USUAL:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[usual] = header
        if size != header.end:
            values = header.end - header.start
            held = max(size - header.start, 0)
            why = ". The disk may have filled during the dump" if held < values else ""
            raise TensorDamaged(
                f"its file has {held:,} bytes of values; {header.kind} {list(header.shape)} has {values:,}{why}"
            )
        return header


def parse_header(start: bytes) -> NpyHeader:
    """Return the header at the beginning of `start`."""
    from numpy.lib import format as npy_format

    stream = io.BytesIO(start)
    try:
        version = npy_format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise TensorDamaged(f"its file is a .npy of version {version[0]}, which is unknown")
        # Version 3 differs from 2 in the names of fields, and a tensor has none.
        read: Any = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Python 2 wrote it
            shape, fortran, dtype = read(stream, max_header_size=LONGEST)
    except TensorDamaged:
        raise
    except Exception as error:  # a hostile header makes numpy raise nearly anything; all of it means the same to us
        if not start.startswith(npy_format.MAGIC_PREFIX):
            raise TensorDamaged("its file is not a .npy file") from None
        raise TensorDamaged(
            f"its file has a header that numpy does not write for a tensor: {str(error)[:120]}"
        ) from None
    if dtype.hasobject:
        raise TensorDamaged("its file holds Python objects, which is a pickle; those are never loaded")
    kind = dtype.str[1:]
    if kind not in _ELEMENTS:
        raise TensorDamaged(f"its file holds elements of type {str(dtype)[:60]!r}, which no tensor has")
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size <= _LARGEST for size in shape):
        raise TensorDamaged("its file has an impossible shape")
    count = math.prod(shape)
    if count * 16 > _LARGEST:
        raise TensorDamaged("its file has an impossible shape")
    at = stream.tell()
    return NpyHeader(kind, dtype.str[0] == ">", fortran, tuple(shape), at, at + count * dtype.itemsize)


def describe_npy(start: bytes, size: int) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of the tensor in a file of `size` bytes that begins with `start`."""
    import numpy

    header = HeaderReader().read(start, size)
    return numpy.dtype(header.kind).name, header.shape


_BLOCK = 1 << 16
"""Elements that are narrowed at a time: they stay in the cache between the passes."""
_KINDS = {name: "b1" if kind == "?" else kind.lstrip("<") for name, kind in NUMPY_NAMES.items()}
_WIDENED = {"bfloat16": "f4", "complex32": "c8", **dict.fromkeys(FLOAT8, "f4")}


def is_stored_as(header: NpyHeader, slot: Slot) -> bool:
    """Whether the bytes of the file are those of the slot already."""
    ordered = not header.fortran or len(header.shape) < 2
    return _KINDS.get(slot.dtype) == header.kind and ordered and not header.swapped and not header.start % 16


def convert(raw: memoryview, header: NpyHeader, slot: Slot) -> memoryview:
    """The bytes of the slot."""
    import numpy

    values: Array = numpy.frombuffer(raw, numpy.dtype(f"{'>' if header.swapped else '<'}{header.kind}"))
    if header.fortran:
        values = numpy.ascontiguousarray(values.reshape(header.shape[::-1]).T).reshape(-1)
    if header.swapped:
        values = values.astype(values.dtype.newbyteorder("<"))
    if _WIDENED.get(slot.dtype) == header.kind:
        narrow = _NARROW.get(slot.dtype, _to_float8)
        made = narrow(values, slot)
    else:
        made = _cast(values, header, slot)
    if made.base is not None or made is values:  # on the memory of the file: that may go
        made = made.copy()
    return made.view(numpy.uint8).data


def _cast(values: Array, header: NpyHeader, slot: Slot) -> Array:
    """The same numbers in the slot's dtype; between types of one family, and never from a float that holds less."""
    import numpy

    kind = _KINDS.get(slot.dtype, "")
    lossy = kind[:1] in "fc" and int(kind[1:] or 0) > int(header.kind[1:])
    family = {"i": "int", "u": "int"}
    same = family.get(kind[:1], kind[:1]) == family.get(header.kind[:1], header.kind[:1])
    if not kind or not same or lossy:
        raise TensorDamaged(f"its file holds {header.kind}, which is not how {slot.dtype} is stored")
    if kind == header.kind:
        return values
    with numpy.errstate(all="ignore"):
        made = values.astype(f"<{kind}")
        _demand_exact(values, made.astype(values.dtype), slot)
    if kind[0] != header.kind[0] and ((values < 0).any() or (made < 0).any()):
        raise _cannot_hold(int(((values < 0) | (made < 0)).argmax()), values, slot)
    return made


def _to_bfloat16(values: Array, slot: Slot) -> Array:
    import numpy

    bits = values.view(numpy.uint32)
    made = numpy.empty(len(bits), numpy.uint16)
    scratch = numpy.empty(min(_BLOCK, len(bits)), numpy.uint32)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK]
        room = scratch[: len(block)]
        numpy.right_shift(block, 16, out=room)
        made[start : start + _BLOCK] = room
        if numpy.bitwise_or.reduce(block) & 0xFFFF:
            raise _cannot_hold(start + int(((block & 0xFFFF) != 0).argmax()), values, slot)
    return made


def _to_complex32(values: Array, slot: Slot) -> Array:
    import numpy

    parts = values.view(numpy.float32)
    with numpy.errstate(all="ignore"):
        made = parts.astype("<f2")
        _demand_exact(parts, made.astype(numpy.float32), slot)
    return made


def _to_float8(values: Array, slot: Slot) -> Array:
    """Each value is looked up by its bits among the 256 that the format has; every NaN becomes the first of its NaNs."""
    import numpy

    table = numpy.array(decode_table(slot.dtype), numpy.float32)
    lost = numpy.isnan(table)
    codes = numpy.flatnonzero(~lost)
    codes = codes[numpy.argsort(table[codes].view(numpy.uint32), kind="stable")]
    known = table[codes].view(numpy.uint32)
    bits = values.view(numpy.uint32)
    at = numpy.minimum(numpy.searchsorted(known, bits), len(known) - 1)
    made = codes[at].astype(numpy.uint8)
    wrong = known[at] != bits
    if lost.any():
        nan = numpy.isnan(values)
        made[nan] = int(lost.argmax())
        wrong &= ~nan
    if wrong.any():
        raise _cannot_hold(int(wrong.argmax()), values, slot)
    return made


_NARROW = {"bfloat16": _to_bfloat16, "complex32": _to_complex32}


def _demand_exact(values: Array, back: Array, slot: Slot) -> None:
    wrong = (values != back) & ~((values != values) & (back != back))
    if wrong.any():
        raise _cannot_hold(int(wrong.argmax()), values, slot)


def _cannot_hold(at: int, values: Array, slot: Slot) -> TensorDamaged:
    return TensorDamaged(
        f"its file holds {values[at].item()!r} at element {at:,}, which {slot.dtype} cannot hold. "
        "Is it the file of another dump?"
    )

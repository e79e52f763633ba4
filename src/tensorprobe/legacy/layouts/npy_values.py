"""Values as a `.npy` file has them, made into those of the tensor that was dumped: its own dtype, row-major, little-endian.

In: the bytes of the file, its header, and the slot. Out: the bytes that the slot demands, in memory of their own.
numpy has no bfloat16, float8 or complex32, so these stand in the file as float32 or complex64. They are narrowed back, and a
value that the true dtype cannot hold is TensorDamaged: then the file is not what its line says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.npy_header import Header
from tensorprobe.model import Slot
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.numerics.float8 import NAMES as FLOAT8
from tensorprobe.numerics.float8 import decode_table

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

_BLOCK = 1 << 16
"""Elements that are narrowed at a time: they stay in the cache between the passes."""
_KINDS = {name: "b1" if kind == "?" else kind.lstrip("<") for name, kind in NUMPY_NAMES.items()}
_WIDENED = {"bfloat16": "f4", "complex32": "c8", **dict.fromkeys(FLOAT8, "f4")}


def is_stored_as(header: Header, slot: Slot) -> bool:
    """Whether the bytes of the file are those of the slot already."""
    ordered = not header.fortran or len(header.shape) < 2
    return _KINDS.get(slot.dtype) == header.kind and ordered and not header.swapped and not header.start % 16


def convert(raw: memoryview, header: Header, slot: Slot) -> memoryview:
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


def _cast(values: Array, header: Header, slot: Slot) -> Array:
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

"""The dtypes a record may hold, by the name torch gives them, with what a reader without torch must know.

`code` is the number used in messages and by the native kernel; it never changes its meaning.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["float", "int", "bool", "complex"]


class DType(NamedTuple):
    """One element type: its name, size in bytes, family and code."""

    name: str
    itemsize: int
    kind: Kind
    code: int


_ROWS: list[tuple[str, int, Kind]] = [
    ("float32", 4, "float"),
    ("float64", 8, "float"),
    ("bfloat16", 2, "float"),
    ("float16", 2, "float"),
    ("int8", 1, "int"),
    ("uint8", 1, "int"),
    ("int16", 2, "int"),
    ("uint16", 2, "int"),
    ("int32", 4, "int"),
    ("uint32", 4, "int"),
    ("int64", 8, "int"),
    ("uint64", 8, "int"),
    ("bool", 1, "bool"),
    ("complex32", 4, "complex"),
    ("complex64", 8, "complex"),
    ("complex128", 16, "complex"),
    ("float8_e4m3fn", 1, "float"),
    ("float8_e5m2", 1, "float"),
    ("float8_e4m3fnuz", 1, "float"),
    ("float8_e5m2fnuz", 1, "float"),
    ("float8_e8m0fnu", 1, "float"),
]

DTYPES: dict[str, DType] = {row[0]: DType(*row, code) for code, row in enumerate(_ROWS)}
BY_CODE: list[DType] = list(DTYPES.values())

_FLOATS: dict[str, tuple[int, int]] = {
    "float64": (53, -1022),
    "complex128": (53, -1022),
    "float32": (24, -126),
    "complex64": (24, -126),
    "float16": (11, -14),
    "complex32": (11, -14),
    "bfloat16": (8, -126),
    "float8_e4m3fn": (4, -6),
    "float8_e4m3fnuz": (4, -7),
    "float8_e5m2": (3, -14),
    "float8_e5m2fnuz": (3, -15),
    "float8_e8m0fnu": (1, -127),
}
"""Floating dtypes: significant bits, and the exponent of the smallest normal number. A complex dtype is that of its parts."""
EPS: dict[str, float] = {name: 2.0 ** (1 - bits) for name, (bits, _) in _FLOATS.items()}
"""The distance from 1 to the next number, as `torch.finfo(dtype).eps`. Integers and bool have none."""
TINY: dict[str, float] = {name: 2.0**least for name, (_, least) in _FLOATS.items()}
"""The smallest normal number, as `torch.finfo(dtype).tiny`."""
HALF = ("float16", "bfloat16")

NUMPY_NAMES: dict[str, str] = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "int8": "i1",
    "uint8": "u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "bool": "?",
    "complex64": "<c8",
    "complex128": "<c16",
}
"""The dtypes that numpy has too, by its name for the stored bytes."""

SAFETENSORS: dict[str, str] = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign[:1].upper() or 'I'}{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The names of dtypes in a .safetensors file, as far as its reader for torch knows them."""

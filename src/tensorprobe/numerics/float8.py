"""What each of the 256 bytes of an 8-bit float format stands for. Pure Python, no numpy, no torch."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple


class _Layout(NamedTuple):
    """Bits of the mantissa, exponent bias, and how the format spends its special codes."""

    mantissa: int
    bias: int
    ieee: bool
    """The greatest exponent holds infinity and NaN, as in IEEE 754."""
    negative_zero_is_nan: bool
    """The only NaN is the code of -0, and there are no infinities (`fnuz`)."""


_LAYOUTS = {
    "float8_e4m3fn": _Layout(mantissa=3, bias=7, ieee=False, negative_zero_is_nan=False),
    "float8_e5m2": _Layout(mantissa=2, bias=15, ieee=True, negative_zero_is_nan=False),
    "float8_e4m3fnuz": _Layout(mantissa=3, bias=8, ieee=False, negative_zero_is_nan=True),
    "float8_e5m2fnuz": _Layout(mantissa=2, bias=16, ieee=False, negative_zero_is_nan=True),
}
_SCALE_ONLY = "float8_e8m0fnu"
"""No sign and no mantissa: the byte is the exponent of a power of two."""

NAMES = (*_LAYOUTS, _SCALE_ONLY)


@cache
def decode_table(name: str) -> tuple[float, ...]:
    """Return the value of every byte of the format `name`; each is exact in float32."""
    if name == _SCALE_ONLY:
        return (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)
    return tuple(_decode(byte, _LAYOUTS[name]) for byte in range(256))


def _decode(byte: int, layout: _Layout) -> float:
    magnitude = byte & 0x7F
    sign = -1.0 if byte & 0x80 else 1.0
    fraction = magnitude & ((1 << layout.mantissa) - 1)
    exponent = magnitude >> layout.mantissa
    if layout.negative_zero_is_nan:
        if byte == 0x80:
            return math.nan
    elif layout.ieee:
        if exponent == 0x7F >> layout.mantissa:
            return math.nan if fraction else sign * math.inf
    elif magnitude == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - layout.bias - layout.mantissa)
    return sign * math.ldexp(fraction + (1 << layout.mantissa), exponent - layout.bias - layout.mantissa)

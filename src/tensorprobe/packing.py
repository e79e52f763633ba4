"""Columns of numbers and words as short texts, for pages and for pictures in a result.

A number keeps three significant digits: what a reader sees. Each byte of the numbers is a plane of its own, so that alike ones
stand together; then they are deflated and written in base64. `web/src/packing.ts` reads them; docs/format.md has the layout.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECIAL = 32767
"""The exponent of what is no finite number: NaN with the mantissa 0, infinities with 1 and -1."""
_LEVEL = 6
_DIGITS = 100
_TINY = 1e-280


def pack_numbers(values: Any) -> str:
    """Return real numbers, each rounded to three significant digits."""
    given = np.asarray(values, dtype=np.float64).ravel()
    mantissa, exponent = _decimal(given)
    return _deflated(mantissa.astype("<i2"), exponent.astype("<i2"))


def pack_integers(values: Any) -> dict[str, Any]:
    """Return integers as differences of neighbours, in as few bytes as these need."""
    given = np.asarray(values, dtype=np.int64).ravel()
    steps = np.diff(given, prepend=np.int64(0))
    for width in (1, 2, 4, 8):
        limit = 1 << (8 * width - 1)
        if not steps.size or (steps.min() >= -limit and steps.max() < limit):
            break
    return {"width": width, "packed": _deflated(steps.astype(f"<i{width}"))}


def pack_words(words: Sequence[str]) -> str:
    """Return texts."""
    return _text(zlib.compress(json.dumps(list(words), ensure_ascii=True, separators=(",", ":")).encode(), _LEVEL))


def _decimal(given: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return x as mantissa and exponent: x = mantissa / 100 * 10 ** exponent, rounded as `format(x, ".2e")` rounds."""
    size = np.abs(given)
    plain = np.isfinite(given) & (size > 0)
    with np.errstate(all="ignore"):
        lifted = np.where(size < _TINY, size * 1e40, size)
        exponent = np.where(plain, np.floor(np.log10(np.where(plain, lifted, 1.0))), 0.0)
        mantissa = np.where(plain, np.rint(lifted / np.power(10.0, exponent) * _DIGITS), 0.0)
        low, high = plain & (mantissa < _DIGITS), plain & (mantissa >= 10 * _DIGITS)
        mantissa = np.where(low, np.rint(lifted / np.power(10.0, exponent - 1) * _DIGITS), mantissa)
        mantissa = np.where(high, np.rint(lifted / np.power(10.0, exponent + 1) * _DIGITS), mantissa)
        exponent = exponent - low + high - np.where(plain & (size < _TINY), 40.0, 0.0)
    exponent = np.where(np.isfinite(given), exponent, SPECIAL)
    mantissa = np.where(np.isinf(given), 1.0, mantissa)
    return np.copysign(mantissa, np.where(np.isnan(given), 1.0, given)), exponent


def _deflated(*columns: NDArray[Any]) -> str:
    planes = [column.view(np.uint8).reshape(-1, column.itemsize).T.tobytes() for column in columns]
    return _text(zlib.compress(b"".join(planes), _LEVEL))


def _text(packed: bytes) -> str:
    return base64.b64encode(packed).decode("ascii")

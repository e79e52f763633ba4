"""What both halves of the numpy twin stand on: stored bytes as float64, and sums in the order of the contract.

The order of summation is part of the contract with the native kernel: value i of a block of 2048 is added to lane i mod 16
of that block, the lanes of the blocks are added up in order, and the 16 lanes are folded in halves.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tensorprobe.model.dtypes import BY_CODE, NUMPY_NAMES, DType
from tensorprobe.numerics import float8

LANES = 16
BLOCK = 2048
CHUNK = 32 * BLOCK
"""Values that are widened at a time, to bound the memory."""
GREATEST_COUNT = 2**58
"""No memory holds more elements; below it, no product of a count and a size can overflow."""


Values = Any
"""A numpy array of one axis."""

_STORED_AS = {
    **NUMPY_NAMES,
    "bool": "u1",
    "bfloat16": "<u2",
    "complex32": "<f2",
    "complex64": "<f4",
    "complex128": "<f8",
    **dict.fromkeys(float8.NAMES, "u1"),
}
"""What the bytes are read as: complex numbers as their parts, and what numpy does not have as bare integers."""
_FLOAT8_VALUES = {name: np.array(float8.decode_table(name)) for name in float8.NAMES}


def check(address: int, count: int, code: int, *, where: str = "") -> None:
    """Raise ValueError unless the row is valid."""
    if not 0 <= code < len(BY_CODE):
        raise ValueError(f"{where}unknown dtype code: {code}")
    if not 0 <= count <= GREATEST_COUNT:
        raise ValueError(f"{where}impossible number of elements: {count}")
    if count and address <= 0:
        raise ValueError(f"{where}null address for {count} elements")


def stored_values(address: int, count: int, dtype: DType) -> Values:
    """Return the memory of `count` elements as numpy reads it, not copied; for a complex dtype, the parts."""
    if count == 0:
        return np.empty(0, _STORED_AS[dtype.name])
    memory = memoryview((ctypes.c_char * (count * dtype.itemsize)).from_address(address))
    return np.frombuffer(memory, dtype=_STORED_AS[dtype.name])


def widen(stored: Values, dtype: DType) -> Values:
    """Return the stored values as float64."""
    if dtype.name in _FLOAT8_VALUES:
        return _FLOAT8_VALUES[dtype.name][stored]
    if dtype.name == "bfloat16":
        return (stored.astype("<u4") << 16).view("<f4").astype("f8")
    if dtype.kind == "bool":
        return (stored != 0).astype("f8")
    return stored.astype("f8")


def whole_blocks(values: Values) -> Values:
    """Return the values as float64, filled up with zeros to whole blocks."""
    filled = np.zeros(-(-values.size // BLOCK) * BLOCK)
    filled[: values.size] = values
    return filled


def lanes_of_blocks(values: Values) -> Values:
    """Return the sums of the 16 lanes of each block: an array of (blocks, lanes)."""
    # A reduction over an outer axis adds row after row; only the innermost axis would be added pairwise.
    return np.add.reduce(values.reshape(-1, BLOCK // LANES, LANES), axis=1)


def add_blocks(lanes: Values, values: Values) -> Values:
    """Return `lanes` plus the lanes of each block of `values`, added in order."""
    return np.add.reduce(np.vstack([lanes[None], lanes_of_blocks(values)]), axis=0)


def fold(lanes: Values) -> Values:
    """Return the sums over the last axis, added in halves."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]

"""Convert the stored bytes of one slot to a torch tensor or a numpy array.

In: a checked buffer and the slot that describes it. Out: a view of that buffer, never a copy, except where numpy has
no such dtype. torch and numpy are imported inside the functions: listing a run does not import them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import TensorDamaged
from tensorprobe.model import DTYPES, Slot
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.numerics.float8 import NAMES as FLOAT8
from tensorprobe.numerics.float8 import decode_table

if TYPE_CHECKING:
    import numpy
    import torch

MAX_DIMENSIONS = 64
_LARGEST = 2**63 - 1


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether these strides permute a block without gaps or overlap, so that the block can be stored as it is."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def demand_shape(slot: Slot) -> int:
    """Return the number of bytes that dtype and shape need; raise TensorDamaged when they are impossible."""
    dtype = DTYPES.get(slot.dtype)
    if dtype is None:
        raise TensorDamaged(f"its dtype {slot.dtype!r} is not a known dtype")
    if len(slot.shape) > MAX_DIMENSIONS:
        raise TensorDamaged(f"it declares {len(slot.shape):,} dimensions, more than {MAX_DIMENSIONS}")
    if slot.shape and not 0 <= min(slot.shape) <= max(slot.shape) <= _LARGEST:
        raise TensorDamaged(f"its shape {list(slot.shape)} is impossible")
    if slot.stride is not None:
        if len(slot.stride) != len(slot.shape):
            raise TensorDamaged(f"it has {len(slot.stride)} strides for {len(slot.shape)} dimensions")
        if slot.stride and not 0 <= min(slot.stride) <= max(slot.stride) <= _LARGEST:
            raise TensorDamaged(f"its stride {list(slot.stride)} is impossible")
    # A tensor without elements has to fit, too: numpy and torch multiply the other sizes.
    if math.prod(filter(None, slot.shape)) * dtype.itemsize > _LARGEST:
        raise TensorDamaged(f"its shape {list(slot.shape)} is impossible")
    return math.prod(slot.shape) * dtype.itemsize


def to_torch(buffer: memoryview, slot: Slot) -> torch.Tensor:
    """Return a CPU tensor on the memory of `buffer`, with its recorded stride if its bytes are a dense block."""
    import torch

    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TensorDamaged(f"its dtype {slot.dtype} is unknown to torch {torch.__version__}; a newer torch reads it")
    if not slot.count:
        # torch.empty would warn that complex32 is experimental; a view on foreign memory does not.
        return torch.frombuffer(bytearray(DTYPES[slot.dtype].itemsize), dtype=dtype)[:0].view(slot.shape)
    if slot.dtype == "bool" and int(torch.frombuffer(buffer, dtype=torch.uint8).max()) > 1:
        raise TensorDamaged("it is bool but holds bytes other than 0 and 1")
    flat = torch.frombuffer(buffer, dtype=dtype)
    if slot.stride is not None and is_dense(slot.shape, slot.stride):
        return flat.as_strided(slot.shape, slot.stride)
    return flat.view(slot.shape)


def contiguous(buffer: memoryview, slot: Slot) -> memoryview:
    """Return the stored bytes in row-major order; a copy if they are a block with a recorded stride."""
    if slot.stride is None or not slot.count or not is_dense(slot.shape, slot.stride):
        return buffer
    import numpy

    size = DTYPES[slot.dtype].itemsize
    steps = [step * size if length != 1 else 0 for step, length in zip(slot.stride, slot.shape, strict=True)]
    return numpy.ascontiguousarray(numpy.ndarray(slot.shape, f"V{size}", buffer, strides=steps)).data.cast("B")


def to_numpy(buffer: memoryview, slot: Slot) -> numpy.ndarray[Any, Any]:
    """Return an array on the memory of `buffer`. bfloat16 and float8 are copied to float32, complex32 to complex64."""
    return widen(stored_elements(buffer, slot), slot.dtype)


def stored_elements(buffer: memoryview, slot: Slot) -> numpy.ndarray[Any, Any]:
    """Return the elements as they are stored, in their shape and never copied; `widen` makes numbers of a part of them."""
    import numpy

    name = NUMPY_NAMES.get(slot.dtype, f"<u{DTYPES[slot.dtype].itemsize}")
    if slot.dtype == "bool" and slot.count and int(numpy.frombuffer(buffer, numpy.uint8).max()) > 1:
        raise TensorDamaged("it is bool but holds bytes other than 0 and 1")
    flat: numpy.ndarray[Any, Any] = numpy.frombuffer(buffer, name)
    if slot.count and slot.stride is not None and is_dense(slot.shape, slot.stride):
        steps = [step * flat.itemsize if size != 1 else 0 for step, size in zip(slot.stride, slot.shape, strict=True)]
        return numpy.ndarray(slot.shape, flat.dtype, flat, strides=steps)
    return flat.reshape(slot.shape)


def widen(values: numpy.ndarray[Any, Any], dtype: str) -> numpy.ndarray[Any, Any]:
    """Return stored elements as numbers that numpy has."""
    import numpy

    if dtype in NUMPY_NAMES:
        return values
    if dtype == "bfloat16":
        bits = values.astype(numpy.uint32)
        bits <<= numpy.uint32(16)  # numpy 1 takes 16 for an int64 where there is one element
        return bits.view(numpy.float32)
    if dtype == "complex32":
        halves = numpy.ascontiguousarray(values).view("<f2").astype(numpy.float32)
        return halves.view(numpy.complex64).reshape(values.shape)
    if dtype in FLOAT8:
        table: numpy.ndarray[Any, Any] = numpy.array(decode_table(dtype), numpy.float32)[values]
        return table
    raise TensorDamaged(f"its dtype {dtype} has no counterpart in numpy")

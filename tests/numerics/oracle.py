"""Tensors of every dtype as raw bytes, and their figures by slow, exact means that share no code with the package."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from tensorprobe.model import DType
from tests.builders.dtypes import KNOWN_DTYPES

EDGE_COUNTS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 300, 2047, 2048, 2049, 2064, 4095, 4096, 4097, 5000]
"""Around the 16 lanes and the blocks of 2048 values."""

_SPECIAL = {
    "float32": [0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x80000000],
    "float64": [0x7FF8 << 48, 0x7FF0 << 48, 0xFFF0 << 48, 1, 0x800F << 48, 0x7FEFFFFFFFFFFFFF, 1 << 63],
    "bfloat16": [0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x7F7F, 0x8000],
    "float16": [0x7E00, 0xFE01, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x7BFF, 0x8000],
}
_SPECIAL |= {"complex64": _SPECIAL["float32"], "complex128": _SPECIAL["float64"], "complex32": _SPECIAL["float16"]}
_UNIT_FORMAT = {1: "B", 2: "H", 4: "I", 8: "Q"}


def unit_size(dtype: DType) -> int:
    """Bytes of one real number of the dtype."""
    return dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize


def make_bytes(dtype: DType, count: int, flavour: str, seed: int) -> bytes:
    """`count` elements: `noise` is any bits, `special` has NaN, infinities and subnormals, `tame` is around one."""
    source = random.Random(seed)
    if dtype.kind == "bool":
        return bytes(source.getrandbits(1) for _ in range(count))
    if flavour == "tame":
        return tame_bytes(dtype, [source.uniform(-2, 2) for _ in range(count)])
    content = source.randbytes(count * dtype.itemsize)
    specials = _SPECIAL.get(dtype.name)
    if flavour == "special" and specials:
        size = unit_size(dtype)
        units = list(struct.unpack(f"<{len(content) // size}{_UNIT_FORMAT[size]}", content))
        units = [source.choice(specials) if source.random() < 0.2 else unit for unit in units]
        content = struct.pack(f"<{len(units)}{_UNIT_FORMAT[size]}", *units)
    return content


def tame_bytes(dtype: DType, values: Sequence[float]) -> bytes:
    """The values rounded to the dtype, as bytes."""
    torch_dtype = getattr(torch, dtype.name)
    numbers = torch.tensor(values, dtype=torch.float64)
    if dtype.kind == "int":
        numbers = (numbers * 50).abs()
    elif dtype.kind == "complex":
        numbers = torch.complex(numbers, -numbers)
    with quiet_about_complex_halves():
        stored = numbers.to(torch_dtype)
    return stored.reshape(-1).view(torch.uint8).numpy().tobytes() if values else b""


@contextmanager
def quiet_about_complex_halves() -> Iterator[None]:
    """torch warns of its own complex32 when the first one is made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


def as_tensor(content: bytes, dtype: DType) -> torch.Tensor:
    """The bytes as torch reads them."""
    torch_dtype = getattr(torch, dtype.name)
    with quiet_about_complex_halves():
        return torch.frombuffer(bytearray(content), dtype=torch_dtype) if content else torch.empty(0, dtype=torch_dtype)


def values_of(content: bytes, dtype: DType) -> list[float]:
    """Every real number in the bytes; decoded by torch, or by Python where torch has no conversion."""
    if dtype.kind == "int":
        formats = {"int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I"}
        letter = formats.get(dtype.name) or {"int64": "q", "uint64": "Q"}[dtype.name]
        return [float(value) for value in struct.unpack(f"<{len(content) // dtype.itemsize}{letter}", content)]
    tensor = as_tensor(content, dtype)
    if dtype.kind == "complex":
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.float64).flatten().tolist()


def assert_figures(figures: Sequence[float], values: Sequence[float], *, rel: float = 1e-12) -> None:
    """Maximum, minimum and counts must be exact, mean and norm right to `rel` of the size of the summands."""
    high, low, mean, norm, nan, inf = figures
    numbers = [value for value in values if not math.isnan(value)]
    finite = [value for value in numbers if not math.isinf(value)]
    assert nan == len(values) - len(numbers)
    assert inf == len(numbers) - len(finite)
    assert_same_number(high, max(numbers, default=math.nan))
    assert_same_number(low, min(numbers, default=math.nan))
    if not finite:
        assert math.isnan(mean) and math.isnan(norm)
        return
    slack = 1e-322
    # Scaled down where the sum of the oracle itself would overflow; elsewhere that would cost subnormals.
    scale = 2.0**-30 if max(map(abs, finite)) > 1e280 else 1.0
    true_mean = math.fsum(value * scale for value in finite) / len(finite) / scale
    size = math.fsum(abs(value) * scale for value in finite) / len(finite) / scale
    assert abs(mean - true_mean) <= rel * size + slack
    true_norm = math.hypot(*finite)
    assert norm == true_norm or abs(norm - true_norm) <= rel * true_norm + slack


def assert_same_number(left: float, right: float) -> None:
    """Equal, where NaN equals NaN."""
    assert left == right or (math.isnan(left) and math.isnan(right)), (left, right)


@contextmanager
def placed(content: bytes, offset: int = 0) -> Iterator[int]:
    """The address of a copy of `content` that starts `offset` bytes after a multiple of 64."""
    room = ctypes.create_string_buffer(len(content) + 128 + offset)
    address = -(-ctypes.addressof(room) // 64) * 64 + offset
    ctypes.memmove(address, content, len(content))
    yield address
    del room


cases = st.tuples(
    st.sampled_from(list(KNOWN_DTYPES.values())),
    st.one_of(st.sampled_from(EDGE_COUNTS), st.integers(0, 400)),
    st.sampled_from(["noise", "special", "tame"]),
    st.integers(0, 2**32),
    st.sampled_from([0, 0, 1, 3, 4, 8]),
)
"""dtype, number of elements, flavour, seed, offset of the address."""

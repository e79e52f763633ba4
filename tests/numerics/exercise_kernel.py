"""Runs a kernel built with sanitizers over every dtype, size and alignment; tools/sanitize.sh starts it.

    exercise_kernel.py KERNEL.so              everything; exits non-zero when a result differs from the twin's
    exercise_kernel.py KERNEL.so --overread   one element too many on purpose: the sanitizer must end the process
    exercise_kernel.py KERNEL.so --overread-pair   the same for the second tensor of a pair

Each tensor stands in a block of exactly its size from the allocator of the sanitizer, so that one byte too far is seen.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import numpy as np

from tensorprobe.model.dtypes import BY_CODE, DType
from tensorprobe.numerics import twin
from tensorprobe.numerics.pairs import RAW

SIZES = [*range(301), 2047, 2048, 2049, 4095, 4097, 6161]
OFFSETS = (0, 1, 2, 3, 4, 5, 7, 8)

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def load(path: str) -> ModuleType:
    loader = ExtensionFileLoader("_native", path)
    spec = spec_from_loader("_native", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def check_tensor(kernel: ModuleType, dtype: DType, count: int, offset: int, content: bytes) -> None:
    """One tensor at an odd address, by all three functions, against the twin."""
    room = libc.malloc(offset + len(content))
    address = room + offset
    ctypes.memmove(address, content, len(content))
    found, wanted = kernel.summarize(address, count, dtype.code), twin.summarize(address, count, dtype.code)
    out = libc.malloc(48)
    row = (ctypes.c_int64 * 3)(address, count, dtype.code)
    kernel.summarize_many(ctypes.addressof(row), 1, out)
    batch = struct.unpack("4d2q", ctypes.string_at(out, 48))
    copied = libc.malloc(len(content))
    kernel.copy(copied, address, len(content))
    same_bytes = ctypes.string_at(copied, len(content)) == content
    for place in (room, out, copied):
        libc.free(place)
    if not (repr(found) == repr(wanted) == repr(batch) and same_bytes):
        sys.exit(f"{dtype.name} x {count} at offset {offset}: kernel {found}, batch {batch}, twin {wanted}")


def check_pair(kernel: ModuleType, dtypes: tuple[DType, DType], count: int, contents: tuple[bytes, bytes]) -> None:
    """Two tensors at odd addresses against the twin."""
    offsets = count % 5, count % 3
    rooms = [libc.malloc(offset + len(content)) for offset, content in zip(offsets, contents, strict=True)]
    for room, offset, content in zip(rooms, offsets, contents, strict=True):
        ctypes.memmove(room + offset, content, len(content))
    row = (ctypes.c_int64 * 5)(rooms[0] + offsets[0], rooms[1] + offsets[1], count, dtypes[0].code, dtypes[1].code)
    figures = []
    for implementation in (kernel, twin):
        out = libc.malloc(kernel.PAIR_BYTES)
        implementation.measure_pairs(ctypes.addressof(row), 1, out)
        figures.append(ctypes.string_at(out, kernel.PAIR_BYTES))
        libc.free(out)
    for room in rooms:
        libc.free(room)
    if figures[0] != figures[1]:
        kernels, twins = (np.frombuffer(content, RAW) for content in figures)
        sys.exit(f"{dtypes[0].name} and {dtypes[1].name} x {count}: kernel {kernels}, twin {twins}")


def exercise_pairs(kernel: ModuleType) -> int:
    """Every pair of dtypes at a few sizes, equal dtypes at all of them; the number of pairs."""
    source = random.Random(2)
    pairs = 0
    for left in BY_CODE:
        for right in BY_CODE:
            for count in SIZES[::3] if left is right else (0, 1, 15, 16, 17, 511, 512, 513, 2049):
                baseline = source.randbytes(count * left.itemsize)
                candidate = baseline if left is right and count % 2 else source.randbytes(count * right.itemsize)
                check_pair(kernel, (left, right), count, (baseline, candidate))
                pairs += 1
    for power in (200, -200):  # sums of such squares are made a second time
        values = [10.0**power * number for number in range(600)]
        content = struct.pack("<600d", *values)
        check_pair(kernel, (BY_CODE[1], BY_CODE[1]), 600, (content, content[8:] + content[:8]))
    return pairs + 2


def exercise(kernel: ModuleType) -> int:
    """Every dtype, size and offset once with random bits; the number of tensors."""
    source = random.Random(1)
    tensors = 0
    for dtype in BY_CODE:
        for place, count in enumerate(SIZES):
            content = source.randbytes(count * dtype.itemsize)
            check_tensor(kernel, dtype, count, OFFSETS[place % len(OFFSETS)], content)
            tensors += 1
        huge = struct.pack("<d", 1e200) * 40
        check_tensor(kernel, dtype, len(huge) // dtype.itemsize, 3, huge)
    refuse(kernel)
    return tensors


def refuse(kernel: ModuleType) -> None:
    """Bad arguments must be refused without a look at the memory."""
    for arguments in ((0, 1, 0), (8, -1, 0), (8, 1, 99), (8, 2**59, 0), (2**80, 1, 0)):
        try:
            kernel.summarize(*arguments)
        except ValueError:
            continue
        sys.exit(f"summarize{arguments} was not refused")
    for numbers in ((0, 8, 1, 0, 0), (8, 0, 1, 0, 0), (8, 8, -1, 0, 0), (8, 8, 1, 0, 99), (8, 8, 2**59, 0, 0)):
        row = (ctypes.c_int64 * 5)(*numbers)
        try:
            kernel.measure_pairs(ctypes.addressof(row), 1, 8)
        except ValueError:
            continue
        sys.exit(f"the pair {numbers} was not refused")


def main() -> None:
    kernel = load(sys.argv[1])
    if "--overread" in sys.argv:
        room = libc.malloc(64)
        ctypes.memset(room, 0, 64)
        kernel.summarize(room, 17, 0)
        sys.exit(0)
    if "--overread-pair" in sys.argv:
        rooms, out = [libc.malloc(size) for size in (80, 64)], libc.malloc(kernel.PAIR_BYTES)
        for room, size in zip(rooms, (80, 64), strict=True):
            ctypes.memset(room, 0, size)
        row = (ctypes.c_int64 * 5)(*rooms, 17, 0, 0)
        kernel.measure_pairs(ctypes.addressof(row), 1, out)
        sys.exit(0)
    print(f"{exercise(kernel)} tensors, {exercise_pairs(kernel)} pairs, features {kernel.features()}")


if __name__ == "__main__":
    main()

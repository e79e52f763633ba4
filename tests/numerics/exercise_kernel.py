"""Runs a kernel built with sanitizers over every dtype, size and alignment; tools/sanitize.sh starts it.

    exercise_kernel.py KERNEL.so              everything; exits non-zero when a result differs from the twin's
    exercise_kernel.py KERNEL.so --overread   one element too many on purpose: the sanitizer must end the process

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

from tensorprobe.model.dtypes import BY_CODE, DType
from tensorprobe.numerics import twin

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


def main() -> None:
    kernel = load(sys.argv[1])
    if "--overread" in sys.argv:
        room = libc.malloc(64)
        ctypes.memset(room, 0, 64)
        kernel.summarize(room, 17, 0)
        sys.exit(0)
    print(f"{exercise(kernel)} tensors, features {kernel.features()}")


if __name__ == "__main__":
    main()

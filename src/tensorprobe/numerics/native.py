"""Choose the code that does the arithmetic: the native kernel or its numpy twin.

`kernel()` returns the extension module, or None if it was not built or `TENSORPROBE_NO_NATIVE=1` is set. `implementation()`
returns the module to use: kernel and twin have the same functions with the same results. Numpy is imported only for the twin.
The kernel takes addresses as integers; `pinned` finds them. The stable ABI of Python 3.10 has no buffer functions, so the
interpreter's own are called through ctypes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

SWITCH = "TENSORPROBE_NO_NATIVE"
EXTENSION = "tensorprobe.numerics._native"


def switched_off() -> bool:
    """Return whether the environment turns native code off."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def kernel() -> ModuleType | None:
    """Return the native extension, or None if the twin is used. Decided once in a process."""
    return extension(EXTENSION)[0]


@cache
def implementation() -> ModuleType:
    """Return the module with `summarize`, `summarize_many`, `peak`, `measure_pairs` and `copy`."""
    return kernel() or importlib.import_module("tensorprobe.numerics.twin")


def describe() -> str:
    """Return one line for users: `native (AVX2, F16C)`, `native (portable)` or `numpy twin (why)`."""
    native, reason = extension(EXTENSION)
    if native is None:
        return f"numpy twin ({reason})"
    return f"native ({', '.join(native.features()) or 'portable'})"


@cache
def extension(name: str) -> tuple[ModuleType | None, str]:
    """Return an extension of ours, or None and the reason."""
    if switched_off():
        return None, f"{SWITCH} is set"
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError:
        return None, "extension not built"
    except ImportError as problem:
        return None, f"extension does not load: {problem}"


_python = ctypes.PyDLL(ctypes.pythonapi._name, handle=ctypes.pythonapi._handle)
"""A separate handle: argument types that other libraries set on `ctypes.pythonapi` do not affect it."""

_CONTIGUOUS_BYTES = 0
"""PyBUF_SIMPLE: one dense block, read-only or not; anything else raises BufferError."""


class _BufferView(ctypes.Structure):
    """`Py_buffer` of CPython, whose layout is the same in every version this package supports."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


@contextmanager
def pinned(buffer: Any) -> Iterator[tuple[int, int]]:
    """Yield the address and the length in bytes of `buffer`; both stay valid inside the block.

    Raises TypeError for an object without a buffer, BufferError for one that is not contiguous.
    """
    view = _BufferView()
    _python.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), _CONTIGUOUS_BYTES)
    try:
        yield view.buf or 0, view.len
    finally:
        _python.PyBuffer_Release(ctypes.byref(view))

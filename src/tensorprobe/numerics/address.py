"""The address of an object's bytes, for the kernel, which takes addresses as plain integers.

The stable ABI of Python 3.10 has no buffer functions, so the interpreter's own are called through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_python = ctypes.PyDLL(ctypes.pythonapi._name, handle=ctypes.pythonapi._handle)
"""A handle of our own: argument types that other libraries set on `ctypes.pythonapi` do not reach it."""

_CONTIGUOUS_BYTES = 0
"""PyBUF_SIMPLE: one dense block, read-only will do; anything else is refused with BufferError."""


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
    """The address and the length in bytes of `buffer`, which keeps both until the block ends.

    TypeError for an object without a buffer, BufferError for one whose bytes are not in one piece.
    """
    view = _BufferView()
    _python.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), _CONTIGUOUS_BYTES)
    try:
        yield view.buf or 0, view.len
    finally:
        _python.PyBuffer_Release(ctypes.byref(view))

"""Keeps torch.compile away from our own frames.

Between its graphs, a compiled function runs with torch's frame hook on. A tap that runs there would be compiled like the
program, with warnings, and could change what the program's own calls do. What torch.compile traces itself is not affected:
it inlines our handlers as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tensorprobe import torch_names

_PACKAGE = f"{__name__.partition('.')[0]}."
_done: set[str] = set()


def keep_uncompiled() -> None:
    """Tell torch to run the frames of every module of ours that was imported, as they are."""
    for name in {name for name in list(sys.modules) if name.startswith(_PACKAGE)} - _done:
        if isinstance(module := sys.modules.get(name), ModuleType):
            for value in list(vars(module).values()):
                for code in _codes(value, module):
                    torch_names.run_as_is(code)
        _done.add(name)


def _codes(value: Any, module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of a function, or of the methods of a class, that this module defines."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = getattr(value, "__wrapped__", value) if isinstance(value, FunctionType) else value
    if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
        yield from _nested(value.__code__)
    elif isinstance(value, property):
        for accessor in (value.fget, value.fset):
            yield from _codes(accessor, module)
    elif isinstance(value, type) and value.__module__ == module.__name__:
        for member in list(vars(value).values()):
            yield from _codes(member, module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)

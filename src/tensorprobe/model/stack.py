"""A Python stack as it is stored: user frames only, innermost first."""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One line of Python that was being executed."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}"


class Stack(msgspec.Struct, frozen=True):
    """A distinct stack of a step and rank; calls refer to it by `id`."""

    id: int
    frames: tuple[Frame, ...]

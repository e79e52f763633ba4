"""The levels at which calls are seen, and what each of them can do. The values are the words on disk and on the command line."""

from __future__ import annotations

from enum import Enum


class Level(str, Enum):
    """The level of one call."""

    MODULE = "module"
    API = "api"
    ATEN = "aten"

    __str__ = str.__str__

    @classmethod
    def of(cls, name: str) -> Level:
        """Return the level of a call or an op with this canonical name."""
        return _BY_FAMILY.get(name.partition(".")[0], cls.API)

    @property
    def is_module(self) -> bool:
        """Whether the call is that of a module: it contains other calls."""
        return self is Level.MODULE

    @property
    def is_op(self) -> bool:
        """Whether the call is that of one op, which can be run again by itself."""
        return self is not Level.MODULE

    @property
    def links_backward(self) -> bool:
        """Whether a backward call has the number of its forward call. ATen ops are counted in each direction by itself."""
        return self is not Level.ATEN

    def call_names(self, op: str, number: int) -> tuple[str, str]:
        """Return the names of a call of `op` and of its backward. A module's name has the direction before the number."""
        if self is Level.MODULE:
            return f"{op}.forward.{number}", f"{op}.backward.{number}"
        return f"{op}.{number}.forward", f"{op}.{number}.backward"


_BY_FAMILY = {"Module": Level.MODULE, "Aten": Level.ATEN}


class CaptureLevel(str, Enum):
    """What a capture records."""

    MODULE = "module"
    API = "api"
    ATEN = "aten"
    MIX = "mix"

    __str__ = str.__str__

    @property
    def has_modules(self) -> bool:
        """Whether calls of modules are recorded."""
        return self in (CaptureLevel.MODULE, CaptureLevel.MIX)

    @property
    def has_api(self) -> bool:
        """Whether calls of torch's API are recorded."""
        return self in (CaptureLevel.API, CaptureLevel.MIX)

    @property
    def has_aten(self) -> bool:
        """Whether ATen ops are recorded."""
        return self is CaptureLevel.ATEN

    @property
    def sees_api(self) -> bool:
        """Whether calls of torch's API are watched; ATen ops are attributed to them."""
        return self.has_api or self.has_aten

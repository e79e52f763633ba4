"""A call with its slots and its stack: one line of `calls.jsonl`, and one of `stacks.jsonl`.

The field names are the keys on disk (docs/format.md); a field that has its default value is left out there.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import force_setattr

from tensorprobe.model.level import Level
from tensorprobe.model.reason import Unrecorded

Direction = Literal["forward", "backward"]
Side = Literal["input", "output", "parameters"]
ArgumentTree = Any
"""JSON: numbers, strings, null, lists; `{"slot": "input.0"}` stands for a tensor, `{"type": ..., "value": ...}` for the rest."""

_DIRECTIONS = ("forward", "backward")
MAX_NAME = 4096
"""No name of a call, slot, module or dtype that is read from a file is longer: what works on names may take more than linear time."""
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""A name whose length is checked when it is decoded."""
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A whole number of a file. JSON has no limit, what computes with it has."""


class Summary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Statistics of one tensor. `min` and `max` ignore NaN; `mean` and `norm` are those of the finite elements.

    A complex tensor is summarised as its real and imaginary parts together. An empty tensor has NaN for the first four.
    """

    max: float | str
    min: float | str
    mean: float | str
    norm: float | str
    nan: Whole = 0
    inf: Whole = 0

    def __post_init__(self) -> None:
        """Convert infinities, which JSON has only as strings, to numbers."""
        if type(self.max) is type(self.min) is type(self.mean) is type(self.norm) is float:
            return
        for field in ("max", "min", "mean", "norm"):
            value = getattr(self, field)
            if type(value) is not float:
                force_setattr(self, field, float(value))


class Slot(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The place of one tensor in a call, and what is known of the tensor."""

    name: Name
    dtype: Name
    shape: tuple[int, ...]
    device: Name = "cpu"
    stride: tuple[int, ...] | None = None
    grad: bool = False
    summary: Summary | None = None
    digest: str | None = None
    offset: int | None = None
    nbytes: int = 0
    skipped: str | None = None
    written: tuple[tuple[int, int], ...] | None = None
    role: str = ""
    sketch: str | None = None

    @property
    def side(self) -> Side:
        """Which side of the call the slot belongs to."""
        return self.name.partition(".")[0]  # type: ignore[return-value]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def unrecorded(self) -> Unrecorded | None:
        """Why neither values nor statistics are in the record; None when they are."""
        return None if self.skipped is None else Unrecorded.of(self.skipped)

    @property
    def has_data(self) -> bool:
        """Whether the values themselves are in the record."""
        return self.offset is not None


PHASES = ("train", "eval", "generate", "optimizer")
"""What a program does when it makes a call. The record adds `, no grad` where gradients are off."""


def phase_in(phase: str, wanted: Collection[str]) -> bool:
    """Return whether a recorded phase is one of those that a user asked for."""
    return phase.partition(",")[0] in wanted


class Call(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One execution of one op, in one direction."""

    name: Name
    level: Level = Level.API
    module: Name = ""
    parent: Name | None = None
    origin: Name | None = None
    stack: Whole | None = None
    thread: Whole = 0
    repeat: Whole = 0
    raised: str | None = None
    args: ArgumentTree = None
    kwargs: ArgumentTree = None
    slots: tuple[Slot, ...] = ()
    phase: str = ""
    microbatch: Whole | None = None

    @property
    def direction(self) -> Direction:
        """forward or backward. A module's name has it before the number, every other name at the end."""
        parts = self.name.rsplit(".", 2)
        return parts[-1] if parts[-1] in _DIRECTIONS else parts[-2]  # type: ignore[return-value]

    @property
    def number(self) -> int:
        """The zero-based index of the call among those of its op, in its step and rank."""
        parts = self.name.rsplit(".", 2)
        return int(parts[-2] if parts[-1] in _DIRECTIONS else parts[-1])

    @property
    def op(self) -> str:
        """The name without number and direction: `Functional.conv2d`, `Module.layers.0.attn.Attention`."""
        return op_of(self.name)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One line of a Python stack."""

    file: str
    line: Whole
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}"


class Stack(msgspec.Struct, frozen=True):
    """A distinct stack of a step and rank: user frames only, innermost first. Calls refer to it by `id`."""

    id: Whole
    frames: tuple[Frame, ...]


def device_of(call: Call) -> str:
    """Return the kind of device that a call was recorded on: the first that is not the CPU, if there is one."""
    kinds = (slot.device.partition(":")[0] for slot in call.slots)
    return next((kind for kind in kinds if kind not in ("", "cpu", "meta")), "cpu")


def op_of(name: str) -> str:
    """Return the name of a call without its number and direction."""
    return name.rsplit(".", 2)[0]


def forward_name(name: str) -> str:
    """Return the name of the forward call that belongs to a backward call; empty if `name` is not that of a backward call."""
    head, middle, last = (["", "", *name.rsplit(".", 2)])[-3:]
    if last == "backward":
        return f"{head}.{middle}.forward"
    return f"{head}.forward.{last}" if middle == "backward" else ""

"""What the training process tells the recorder, as typed messages.

A frame on the pipe is a length of four bytes and a msgpack pair `(pieces, event)`.
`pieces` are the places in the ring filled since the last frame, in order; each tensor ends with a piece that has `last` set,
and tensors are numbered 0, 1, 2 … in that order by both sides: that number is the `token` of a slot.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensorprobe.legacy.layouts.forms import Form
from tensorprobe.model import Level

NO_TOKEN = -1
HEADER_BYTES = 4


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one tensor in the ring."""

    position: int
    nbytes: int
    dtype: int
    last: bool


class SlotEvent(msgspec.Struct, frozen=True, array_like=True):
    """A slot as the tap saw it; `token` names its bytes, `summary` is given when the device computed it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    stride: tuple[int, ...] | None
    grad: bool
    token: int
    skipped: str | None
    summary: tuple[float, float, float, float, int, int] | None = None


class CallEvent(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A call that has ended."""

    name: str
    level: Level
    module: str
    parent: str | None
    origin: str | None
    stack: int | None
    thread: int
    repeat: int
    raised: str | None
    args: Any
    kwargs: Any
    slots: list[SlotEvent]


class StepEvent(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The calls that follow belong to this step."""

    step: int


class StackEvent(msgspec.Struct, frozen=True, array_like=True, tag="stack"):
    """A stack not seen before in this step; the recorder looks up the source lines."""

    id: int
    frames: list[tuple[str, int, str]]


class DropEvent(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """These tokens will not be asked for."""

    tokens: list[int]


class CloseEvent(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The run ends here in good order, with the trainer's part of the coverage."""

    coverage: dict[str, Any]
    coordinates: dict[str, int]
    device: str


Event = CallEvent | StepEvent | StackEvent | DropEvent | CloseEvent | None


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message."""

    pieces: list[Piece]
    event: Event


class Orders(msgspec.Struct, frozen=True):
    """What a recorder is told when it starts."""

    run: str
    rank: int
    trainer_pid: int
    ring_fd: int
    ring_bytes: int
    pipe_fd: int
    keep_data: bool
    max_bytes: int | None
    direct: bool
    form: Form | None = None
    """Another form than our own."""

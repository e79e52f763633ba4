"""Messages from the training process to the recorder.

A frame on the pipe is a length of four bytes and the msgpack of a `Frame`. `pieces` are the places in the ring that were
filled since the last frame, in order. Each tensor ends with a piece that has `last` set. Both sides number tensors 0, 1, 2 …
in that order; that number is the `token` of a slot.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensorprobe.model.event import Event, Frames

LENGTH_BYTES = 4


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one tensor in the ring."""

    position: int
    nbytes: int
    dtype: int
    last: bool


class StepNote(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The calls that follow belong to this step."""

    step: int


class StackNote(msgspec.Struct, frozen=True, array_like=True, tag="stack"):
    """A stack not seen before in this step. The recorder looks up the source lines."""

    id: int
    frames: Frames
    cells: dict[int, str] = {}
    """Source lines that only this process has, such as those of a notebook's cell, by the position of their frame."""


class DropNote(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """No call will name these tokens."""

    tokens: list[int]


class CloseNote(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The run ends normally. `coverage` is what the trainer counted."""

    coverage: dict[str, Any]
    coordinates: dict[str, int]
    device: str
    raised: str = ""
    """The exception that ends the program, if one does."""


class EndNote(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The step has ended: no more calls of it will come."""

    step: int


Note = StepNote | StackNote | DropNote | CloseNote | EndNote


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message: bytes in the ring, and a call or a note or neither."""

    pieces: list[Piece]
    call: Event | None = None
    note: Note | None = None


class Orders(msgspec.Struct, frozen=True):
    """What a recorder is started with."""

    run: str
    rank: int
    trainer_pid: int
    ring_fd: int
    ring_bytes: int
    pipe_fd: int
    lock_fd: int
    """The rank's part, open and locked; -1 where there is none."""
    keep_data: bool
    max_bytes: int | None
    direct: bool
    layout: str = ""
    """The registered writer of another tool's layout; our own when empty."""
    layout_options: dict[str, Any] = {}
    """Passed to that writer."""

"""A call on its way from a tap to a sink, and to its line on disk.

One struct goes all the way. A tap creates it, the recorder process fills in what became of each tensor, and its JSON is
the line of `calls.jsonl`. The fields have the names and the order they have on disk (docs/format.md), and a field with its
default value is left out. `Call` and `Slot` are the same line as a reader sees it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensorprobe.model.call import ArgumentTree
from tensorprobe.model.level import Level

NO_TOKEN = -1
Frames = list[tuple[str, int, str]]
"""File, line and function of each of the user's frames, innermost first."""


class SlotEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """One tensor of a call.

    `token` names the bytes that were copied for it, and is cleared before the line is written. `summary` is set by the
    tap when a device computes the statistics, otherwise by the recorder. msgspec recognises a default value by identity:
    texts that may be equal to a default have to be interned.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    stride: tuple[int, ...] | None = None
    grad: bool = False
    token: int = NO_TOKEN
    summary: Any = None
    digest: str | None = None
    nbytes: int | None = None
    offset: int | None = None
    skipped: str | None = None
    written: tuple[tuple[int, int], ...] | None = None
    role: str = ""


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """A call. While it runs `slots` holds its inputs; when it reaches a sink it has ended and holds the outputs too."""

    name: str
    level: Level = Level.API
    module: str = ""
    parent: str | None = None
    origin: str | None = None
    stack: int | None = None
    thread: int = 0
    repeat: int = 0
    phase: str = ""
    microbatch: int | None = None
    raised: str | None = None
    args: ArgumentTree = None
    kwargs: ArgumentTree = None
    slots: list[SlotEvent] = []
    result: ArgumentTree = None
    """The results, those that are no tensors among them, if the sink's rules ask for them; a list unless they have names."""

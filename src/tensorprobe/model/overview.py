"""What a reader of a run is shown: the run as a whole, or one call with its tensors.

`record` makes these, `report` words them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensorprobe.model.call import ArgumentTree, Direction, Frame, Summary
from tensorprobe.model.level import Level
from tensorprobe.model.manifest import Coverage

Number = float | int | bool | str
"""A sample value; complex numbers come as text."""


class SegmentOverview(msgspec.Struct, frozen=True):
    """One rank in one step: how many calls can be read, how many lines cannot, how large its tensors are."""

    step: int
    rank: int
    calls: int
    damaged: int
    size_bytes: int


class RunOverview(msgspec.Struct, frozen=True):
    """A run as a whole. `coverage` is the sum over its ranks; `incomplete` says which steps of an unclosed run are complete."""

    path: str
    closed: bool
    incomplete: str | None
    steps: list[int]
    ranks: list[int]
    calls: int
    damaged: int
    size_bytes: int
    devices: dict[int, str]
    coordinates: dict[int, dict[str, int]]
    tool: str
    torch: str
    python: str
    created: str
    world_size: int
    settings: dict[str, Any]
    coverage: Coverage
    segments: list[SegmentOverview]
    provenance: dict[str, Any] = {}
    exit_code: int | None = None
    lacks: str = ""
    """What the format of the run does not say."""
    example: str | None = None


class Element(msgspec.Struct, frozen=True):
    """A value and where in the tensor it stands."""

    value: Number
    index: list[int]


class SlotView(msgspec.Struct, frozen=True):
    """One tensor of a call, with samples of its values when they were recorded; `problem` says why there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    stride: tuple[int, ...] | None
    grad: bool
    summary: Summary | None
    digest: str | None
    nbytes: int
    skipped: str | None
    first: list[Number] = []
    places: dict[str, Element] = {}
    problem: str | None = None


class CallView(msgspec.Struct, frozen=True):
    """One call with everything that was recorded of it."""

    name: str
    step: int
    rank: int
    index: int
    level: Level
    direction: Direction
    module: str
    parent: str | None
    origin: str | None
    thread: int
    repeat: int
    raised: str | None
    frames: list[Frame]
    args: ArgumentTree
    kwargs: ArgumentTree
    slots: list[SlotView]
    phase: str = ""
    microbatch: int | None = None


class CallLine(msgspec.Struct, frozen=True):
    """One call in a list of calls."""

    name: str
    step: int
    rank: int
    index: int
    repeat: int
    module: str
    outputs: list[str]
    phase: str = ""

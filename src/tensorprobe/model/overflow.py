"""The report of an overflow watch, and of a search for overflows in a recorded run."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from tensorprobe.model.call import Direction, Frame

Kind = Literal["nan", "inf", "saturated", "flagged"]
"""NaN, infinity, stuck at the largest number of the dtype, or reported by the device's overflow register only."""
Verdict = Literal["normal", "abnormal", "unknown"]
"""Normal: the CPU overflows too, the numbers are too large. Abnormal: only the device overflows."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """An input of the call. `min` and `max` ignore NaN; `margin` is the limit of the dtype over the largest magnitude."""

    slot: str
    dtype: str
    shape: list[int]
    min: float
    max: float
    nan: int
    inf: int
    margin: float
    producer: str | None = None
    here: float | None = None
    """Of an input of the forward: its value where the first NaN or inf is."""


class BadOutput(msgspec.Struct, frozen=True, kw_only=True):
    """An output of the call: `count` of `elements` are bad, and `first` has the indices of the first of them."""

    slot: str
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    count: int
    elements: int
    first: list[list[int]]


class FirstNonfinite(msgspec.Struct, frozen=True, kw_only=True):
    """A call that returned a NaN or inf although its inputs were finite, or infinite on purpose."""

    number: int
    call: str
    op: str
    direction: Direction
    kind: Kind
    module: str
    step: int
    rank: int
    index: int
    """The number of calls of this rank in this step before this one."""
    repeat: int
    epoch: int
    """The number of collectives that this rank had started in this step. Findings of several ranks are ordered by it."""
    outputs: list[BadOutput]
    inputs: list[Extent]
    forward: list[Extent] = []
    """Of a backward: the inputs of its forward, as far as they are known."""
    frames: list[Frame]
    chain: list[str]
    """The call that made the input, the call that made the input of that one, and so on."""
    before: list[str]
    """The calls before this one, oldest first."""
    spread: list[str]
    spread_count: int
    verdict: Verdict
    reason: str
    script: str | None
    note: str


class Arrived(str, Enum):
    """What held a NaN or inf that no watched call made."""

    INPUT = "input"
    NUMBER = "number"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    MEMORY = "uninitialised memory"
    OTHER_RANK = "from another rank"

    __str__ = str.__str__


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A NaN or inf that no watched call made: in the data, in a parameter, in uninitialised memory."""

    call: str
    slot: str
    what: str
    """`parameter blocks.0.weight`, `input`, `uninitialised memory`, `from another rank`, `gradient`, `number`."""
    module: str
    step: int
    rank: int
    index: int
    epoch: int
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    frames: list[Frame]
    spread: list[str]
    spread_count: int

    @property
    def kind(self) -> Arrived:
        """What it is, without the name that may follow in `what`."""
        return next((kind for kind in Arrived if self.what.startswith(kind.value)), Arrived.INPUT)


class NearLimit(msgspec.Struct, frozen=True, kw_only=True):
    """An output near the limit of its dtype: the nearest of this op in this module."""

    call: str
    module: str
    step: int
    rank: int
    dtype: str
    greatest: float
    limit: float
    times: int


class OverflowReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. `first_nonfinite` is in causal order."""

    schema_version: int
    tool: str
    source: str
    ranks: list[int]
    calls: int
    exit_code: int
    """0: no unexpected NaN or inf; 1: at least one; 2: no call could be checked."""
    first_nonfinite: list[FirstNonfinite]
    arrivals: list[Arrival]
    near: list[NearLimit]
    intended: dict[str, int]
    """Intentional infinities: op → number of calls."""
    skipped_by_scaler: list[str]
    """Calls that overflowed in a step that a GradScaler then skipped."""
    last_calls: dict[int, list[str]]
    """Rank → the last calls of a process that died."""
    left_out: int
    """The number of findings beyond the maximum that is kept."""
    closed: bool
    notes: list[str]

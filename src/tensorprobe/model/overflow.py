"""Where infinities and NaN are born: what a watch over a training, or a look at a recorded run, has to say."""

from __future__ import annotations

from typing import Literal

import msgspec

from tensorprobe.model.call import Direction, Frame

Kind = Literal["nan", "inf", "saturated", "flagged"]
"""NaN; infinity; stuck at the greatest number of the dtype; the device says so and the values do not."""
Verdict = Literal["normal", "abnormal", "unknown"]
"""Normal: the numbers are that large, the CPU overflows too. Abnormal: only the device does."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that went into a call. `min` and `max` pass over NaN; `margin` is how often its greatest fits below the limit."""

    slot: str
    dtype: str
    shape: list[int]
    min: float
    max: float
    nan: int
    inf: int
    margin: float
    producer: str | None = None


class Born(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that came out of it. `count` elements are concerned, of `elements`; `first` are the places of some."""

    slot: str
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    count: int
    elements: int
    first: list[list[int]]


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose inputs were finite, or infinite on purpose, and whose output is not."""

    number: int
    call: str
    op: str
    direction: Direction
    kind: Kind
    module: str
    step: int
    rank: int
    index: int
    """How many calls the rank had made in the step before."""
    repeat: int
    epoch: int
    """How many collectives the rank had begun in the step: orders births of different ranks."""
    outputs: list[Born]
    inputs: list[Extent]
    frames: list[Frame]
    chain: list[str]
    """Who made the input, who made the input of that, and so on."""
    before: list[str]
    """The last calls, the latest last."""
    spread: list[str]
    spread_count: int
    verdict: Verdict
    reason: str
    script: str | None
    note: str


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Something not finite that no watched call has made: data, a parameter, memory that was never filled."""

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


class NearLimit(msgspec.Struct, frozen=True, kw_only=True):
    """An output that came near to the limit of its dtype, the nearest of its call's kind in its module."""

    call: str
    module: str
    step: int
    rank: int
    dtype: str
    greatest: float
    limit: float
    times: int


class OverflowReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. Births are in causal order, the first first."""

    schema_version: int
    tool: str
    source: str
    ranks: list[int]
    calls: int
    exit_code: int
    """0: no unexpected NaN or inf; 1: at least one; 2: no call could be looked at."""
    births: list[Birth]
    arrivals: list[Arrival]
    near: list[NearLimit]
    intended: dict[str, int]
    """Infinities on purpose: the op → how often."""
    skipped_by_scaler: list[str]
    """Backward calls that overflowed in steps which a GradScaler then skipped."""
    last_calls: dict[int, list[str]]
    """By rank: what a process that died had called last."""
    left_out: int
    """Births beyond the most that are kept."""
    closed: bool
    notes: list[str]

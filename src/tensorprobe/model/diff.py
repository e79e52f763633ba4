"""Two tensors side by side: where they differ, in which pattern, how far, and pictures of both.

`pairing` makes these, `report` words and draws them. A result folder keeps those of its findings, so that a report needs no run.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from tensorprobe.model.call import Frame, Summary

Extent = Literal["all", "one", "head", "tail", "range", "every", "blocks", "some"]
"""Which indices of an axis: all, a single one, the first, the last, neighbours, every n-th, a part of every n, others."""
Effect = Literal[
    "", "zero", "constant", "scale", "bias", "sign", "shift", "swap", "transposed", "rounded", "nan", "inf"
]
"""What the candidate holds there: nothing that can be named, zeros, one value, a multiple, a sum, values from elsewhere, …"""


class AxisPart(msgspec.Struct, frozen=True, kw_only=True):
    """The indices of one axis at which elements differ."""

    axis: int
    name: str
    """`columns`, `rows`, `heads`, …"""
    size: int
    extent: Extent
    first: int
    last: int
    count: int
    period: int = 0
    """Of `every` and `blocks`: `count` indices of each `period` differ, from `first` to `last` in the first of them."""
    listed: list[int] = []
    """The indices of `some`, if there are few."""


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """Where two tensors differ and what the candidate holds there. `report.pattern` puts it into words."""

    count: int
    """Elements that differ beyond `others`."""
    axes: list[AxisPart] = []
    """For each axis of more than one index; empty when the elements that differ have no common place."""
    elements: list[list[int]] = []
    """The indices, when there are very few."""
    others: float = 0.0
    """The greatest difference of the other elements."""
    effect: Effect = ""
    value: float = 0.0
    """The factor of `scale`, the amount of `bias`, the value of `constant`, the bits of `rounded`."""
    axis: int = -1
    """Of `shift` and `swap`: along which axis."""
    axis_name: str = ""
    by: list[int] = []
    """Of `shift`: how far. Of `swap`: the two indices."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The error along one axis, at most 64 bins: the greatest difference, and how many elements differ, in each."""

    axis: int
    name: str
    size: int
    width: int
    """Indices in each bin."""
    greatest: list[float]
    different: list[int]


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """One element of both tensors."""

    index: list[int]
    baseline: float
    candidate: float
    difference: float
    ulp: float


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts between edges. On a signed logarithmic scale the middle bin holds what is (almost) zero."""

    edges: list[float]
    counts: dict[str, list[int]]
    """`baseline` and `candidate`, or `difference`, or `ulp`."""
    sampled: int = 0
    """The number of elements that were counted, if these are not all."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as a small matrix. Each cell stands for a block of elements and holds the one that differs most.

    `planes` are baseline, candidate and difference: numbers packed by `report.packing`, row by row.
    """

    title: str
    rows: int
    columns: int
    row_axes: list[int]
    """The axes that were folded into rows, outermost first."""
    row_block: int
    column_block: int
    height: int
    """Rows before blocks were made."""
    width: int
    planes: list[str]
    fixed: list[int] = []
    """The indices of the leading axes, if the picture is a slice."""


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a call in both runs."""

    call: str
    candidate_call: str
    step: int
    rank: int
    slot: str
    dtypes: tuple[str, str]
    shapes: tuple[list[int], list[int]]
    summaries: tuple[Summary | None, Summary | None] = (None, None)
    figures: dict[str, float] = {}
    """The figures of `model.comparison.Row`, if both sides have values."""
    pattern: Pattern | None = None
    profiles: list[Profile] = []
    worst: list[Worst] = []
    values: Histogram | None = None
    differences: Histogram | None = None
    ulps: Histogram | None = None
    pictures: list[Picture] = []
    problem: str = ""
    """Why there are no values to look at, or which part was left out."""


class SlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a call in both runs, in a line."""

    slot: str
    dtypes: tuple[str, str]
    shapes: tuple[list[int], list[int]]
    equal: bool | None
    """Whether both hold the same bits; None where that is not known."""
    max_abs: float = math.nan
    relative_l2: float = math.nan
    problem: str = ""


class CallDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One call in both runs: a line for each slot, and the slot that differs most, or was asked for, in detail."""

    call: str
    candidate_call: str
    step: int
    rank: int
    module: str
    slots: list[SlotLine]
    tensor: TensorDiff | None = None

    def __repr__(self) -> str:
        differing = ", ".join(line.slot for line in self.slots if not line.equal)
        return f"<diff of {self.call}: {f'different: {differing}' if differing else 'equal'}; see .slots, .tensor>"


class SourceLines(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of the user's program around the call. Without its file, the recorded line alone."""

    file: str
    line: int
    function: str
    first: int
    """The number of the first line of `text`."""
    text: list[str]


class CallEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one call of both runs, so that a report needs neither."""

    step: int
    rank: int
    index: int
    call: str
    candidate_call: str
    module: str
    source: SourceLines | None = None
    stacks: tuple[list[Frame], list[Frame]] = ([], [])
    arguments: tuple[str, str] = ("", "")
    tensors: list[TensorDiff] = []

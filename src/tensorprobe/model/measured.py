"""The pairs of slots of one rank in one step, measured and not yet judged: columns, because there may be millions.

`compare` fills them, `judge` reads them and fills `Opinion`. Arrays are numpy arrays; this module needs none to exist.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import FIGURES, Basis, Buckets, ExternalKind, Finding, Proof
from tensorprobe.model.level import Level
from tensorprobe.model.reason import Unmeasured

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
else:
    Array = Any

SIDES = ("input", "output", "parameters")
BASES: tuple[Basis, ...] = ("values", "digest", "statistics", "none")
VALUES, DIGEST, STATISTICS, NONE = range(4)
"""Codes in the column `basis`, in the order of `BASES`."""
UNKNOWN_DTYPE = -1
SOFT, HARD = 1, 2


INPUTS = ("identical", "agree", "diverge", "unknown")
AGREES, DIVERGES, UNMEASURED = range(3)
VERDICTS = ("agrees", "diverges", "unmeasured")
JUDGED = ("", *(name for name, column in FIGURES.items() if column.judged))
"""The figures that a policy may judge by, each by its distance from the value for equal tensors."""


@dataclass
class Calls:
    """The paired calls, in execution order of the baseline. One entry each."""

    name: list[str] = field(default_factory=list)
    candidate: list[str] = field(default_factory=list)
    op: list[str] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    repeat: list[int] = field(default_factory=list)
    level: list[Level] = field(default_factory=list)
    direction: list[str] = field(default_factory=list)
    module: list[str] = field(default_factory=list)
    candidate_module: list[str] = field(default_factory=list)
    stack: list[int | None] = field(default_factory=list)
    candidate_stack: list[int | None] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    """For a backward call the position of its forward call, else -1."""
    structural: list[int] = field(default_factory=list)
    """0: alike. SOFT: another dtype or argument, values can be compared. HARD: another shape, a lacking slot, an exception."""
    first_row: list[int] = field(default_factory=list)
    """Where its rows start; they end where those of the next call start."""


@dataclass
class Rows:
    """The pairs of slots, call by call. `figures` has a column for each figure of `model.comparison.Row`."""

    call: Array
    slot: list[str]
    side: Array
    dtypes: tuple[Array, Array]
    """Codes of `model.dtypes`, or UNKNOWN_DTYPE, of baseline and candidate."""
    dtype_names: tuple[list[str], list[str]]
    shapes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]]
    basis: Array
    content: tuple[Array, Array]
    """What each side holds: position in `Measured.contents`, alike on both sides and in all calls; -1 when unknown."""
    layout: Array
    """0 where both sides are laid out alike in memory, else the number of the pair of strides."""
    key: Array
    """Rows with the same key hold the same pair of tensors; -1 where nothing differs or nothing was measured."""
    made: Array
    """Whether the call made the tensor: outputs, and in a backward call the gradients of the parameters."""
    grad: Array
    other_bits: Array
    """Whether both sides have digests of one kind, and these differ: the tensors do, however alike their statistics are."""
    note: list[str]
    figures: dict[str, Array]
    unmeasured: dict[int, Unmeasured] = field(default_factory=dict)
    """Row → why it was not measured."""
    roles: dict[int, str] = field(default_factory=dict)
    """Row → what the tensor is to the training on both sides, by its name in the baseline: `parameter NAME`, `buffer NAME`."""
    masked: set[int] = field(default_factory=set)
    """Rows of which each side has a mask of its own, as -1e9 and -inf; the masked elements are set apart."""


@dataclass
class Measured:
    """One rank in one step. `contents` and `layouts` are what the columns of these names number, alike in all steps."""

    step: int
    rank: int
    calls: Calls
    rows: Rows
    contents: list[Hashable]
    layouts: list[Hashable]
    buckets: Buckets
    findings: list[Finding]
    findings_left_out: int
    unused_map: list[str] = field(default_factory=list)
    """What the user's map names and these calls do not have."""
    regions: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    """Regions of calls without a partner, by name → the names of their calls on both sides."""
    idle: set[str] = field(default_factory=set)
    """Regions whose random ops, if they have any, drew nothing."""
    coarse: bool = False
    """Whether the calls differ so much that they were aligned by a method that may miss pairs."""
    read: tuple[int, int] = (0, 0)
    """How many calls were read from each run."""
    other_layout: bool = False
    """Whether the runs had other numbers of processes: then tensors of other shapes are other parts, and no difference."""
    noise: tuple[Array, Array] | None = None
    """For each row the RMS and the maximum difference between right runs of the baseline, if there are several."""

    def rows_of(self, call: int) -> range:
        """Return the rows of a call."""
        first = self.calls.first_row
        return range(first[call], first[call + 1] if call + 1 < len(first) else len(self.rows.slot))

    @cached_property
    def region_positions(self) -> list[int]:
        """The calls that stand for regions."""
        return [at for at, name in enumerate(self.calls.name) if name.rsplit(".", 1)[0] in self.regions]

    def region_calls(self, call: int) -> list[str]:
        """Return the names of the calls of both sides that a call stands for, in its direction."""
        name = self.calls.name[call]
        ours, theirs = self.regions[name.rsplit(".", 1)[0]]
        return [each for each in (*ours, *theirs) if bool(forward_name(each)) == bool(forward_name(name))]

    def identities(self) -> list[Hashable]:
        """Return what identifies the pair of tensors of each row across steps; None where nothing differs or was measured."""
        rows, contents, layouts = self.rows, self.contents, self.layouts
        columns = zip(*(each.tolist() for each in (rows.key, *rows.content, rows.layout)), strict=True)
        return [
            None if key < 0 else (contents[one], contents[other], layouts[laid]) for key, one, other, laid in columns
        ]


class Opinion(NamedTuple):
    """What was judged of one pair of tensors: the figure that decided, its value, and what is allowed."""

    judged_by: str
    measured: float
    allowed: float

    @property
    def passes(self) -> bool:
        """Whether the figure is within its limit."""
        return self.measured <= self.allowed


class Entering(NamedTuple):
    """A tensor that differs where it enters a call, although no recorded call has made the difference."""

    row: int
    call: int
    kind: ExternalKind
    origin: str = ""
    """What is known of where it comes from, in words."""


class Question(NamedTuple):
    """A row of which more must be measured: how it has changed since the step before."""

    row: int
    call: int
    gradients: tuple[tuple[str, str, int, str], ...] = ()
    """Those recorded of it in the step before: names of both calls, how many times it was recorded before, and the slot."""


class Update(NamedTuple):
    """How a tensor has changed since the step before, on both sides."""

    off: float
    """The share of elements whose changes differ by more than a hundredth and more than rounding; where the gradients are noise,
    by more than elements move."""
    factor: float
    """The median factor between the changes; NaN where too few elements have changed."""
    size: float
    """The RMS of the change over that of the tensor."""
    slope: float | None = None
    """The factor between the tensors, without elements whose gradients are noise; NaN where nothing is left. None: not known."""
    gain: float = math.nan
    """How many times further apart the changes of an element are than its recorded gradients, by the medians of both; an eps of
    a gradient counts as noise. NaN where the gradients are not known."""


@dataclass
class Opinions:
    """The opinion on each row of a `Measured` as columns, its verdict, and the status of each call."""

    verdict: Array
    """Codes: 0 agrees, 1 diverges, 2 unmeasured."""
    judged_by: Array
    """For each row the figure that came nearest to its limit, or exceeded it furthest: position in `JUDGED`."""
    measured: Array
    allowed: Array
    status: Array
    """For each call: position in `model.comparison.STATUSES`."""
    inputs: Array
    """For each call: position in `INPUTS`."""
    input_error: Array
    entering: list[Entering] = field(default_factory=list)
    """Tensors that differ although no recorded call made the difference."""
    untold: list[Entering] = field(default_factory=list)
    """The same, where the record does not show whether they may differ."""
    unseen_updates: int = 0
    """How many parameters differ whose update no recorded call made."""
    questions: list[Question] = field(default_factory=list)
    """What else should be measured."""
    proofs: Mapping[int, Proof] = field(default_factory=dict)
    """Of calls that were replayed in float64, by their position."""
    unproved: Mapping[int, str] = field(default_factory=dict)
    """Why calls that differ were not replayed, by their position."""
    whole: int = 0
    """If the runs had other numbers of processes: how many tensors that are whole in every layout agree since the first step."""
    withdrawn: set[int] = field(default_factory=set)
    """Calls whose results are further apart than inference allows, and which are proved to be right on both sides."""

"""The pairs of slots of one rank in one step, measured and not yet judged: columns, because there may be millions.

`compare` fills them, `judge` reads them and fills `Opinion`. Arrays are numpy arrays; this module needs none to exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorprobe.model.comparison import FIGURES, Buckets, Finding, Proof
from tensorprobe.model.level import Level
from tensorprobe.model.reason import Unmeasured

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
else:
    Array = Any

SIDES = ("input", "output", "parameters")
BASES = ("values", "digest", "statistics", "none")
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
    key: Array
    """Rows with the same key hold the same pair of tensors."""
    made: Array
    """Whether the call made the tensor: outputs, and in a backward call the gradients of the parameters."""
    grad: Array
    other_bits: Array
    """Whether both sides have digests of one kind, and these differ: the tensors do, however alike their statistics are."""
    note: list[str]
    figures: dict[str, Array]
    unmeasured: dict[int, Unmeasured] = field(default_factory=dict)
    """Row → why it was not measured."""


@dataclass
class Measured:
    """One rank in one step. `keys` names the pairs of tensors across steps: key number → what identifies the pair."""

    step: int
    rank: int
    calls: Calls
    rows: Rows
    keys: list[Any]
    buckets: Buckets
    findings: list[Finding]
    findings_left_out: int
    unused_map: list[str] = field(default_factory=list)
    """What the user's map names and these calls do not have."""
    coarse: bool = False
    """Whether the calls differ so much that they were aligned by a method that may miss pairs."""


class Opinion(NamedTuple):
    """What was judged of one pair of tensors: the figure that decided, its value, and what is allowed."""

    judged_by: str
    measured: float
    allowed: float

    @property
    def passes(self) -> bool:
        """Whether the figure is within its limit."""
        return self.measured <= self.allowed


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
    externals: list[tuple[int, int]]
    """(row, call) of tensors that differ although no recorded call produced them."""
    proofs: Mapping[int, Proof] = field(default_factory=dict)
    """Of calls that were replayed in float64, by their position."""
    withdrawn: set[int] = field(default_factory=set)
    """Calls whose results are further apart than inference allows, and which are proved to be right on both sides."""

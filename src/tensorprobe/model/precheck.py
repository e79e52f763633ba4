"""What checking the calls of a run one by one gives: a verdict for each call and direction, and the figures behind it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tensorprobe.model.call import Direction, Frame

Passed = Literal["pass", "fail", "skip"]
NO_DROPOUT = "dropout 0"
"""The variant of a call inside which dropout is off."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One output or one gradient of a call: the device's against the reference."""

    direction: Direction
    slot: str
    device_dtype: str
    reference_dtype: str
    shape: list[int]
    result: Passed
    judged_by: str
    measured: float
    allowed: float
    message: str = ""
    one_minus_cosine: float = 0.0
    relative_l2: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    within_1e3: float = 1.0
    within_1e4: float = 1.0
    ulp_max: float = 0.0
    different: int = 0
    nonfinite_different: int = 0
    own_relative_l2: float | None = None
    """The error of the CPU in the call's own dtype, against the same reference; None where it was not needed."""
    place: list[int] = []
    """The index of the largest error; empty where none was measured."""
    compared: bool = True
    """False where there are no figures but the one that decided: random numbers, a shape."""
    variant: str = ""
    """Which hard inputs it was, or NO_DROPOUT; empty for the call as it was recorded."""


class CallCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One call, run alone. `backward` is skip where nothing is differentiable, or was not asked for."""

    call: str
    op: str
    step: int
    rank: int
    line: int
    """Of the call in its step and rank, from 0."""
    module: str
    forward: Passed
    backward: Passed
    message: str
    """Why it failed or was skipped; empty when all is well."""
    details: list[Checked]
    inside: list[str] = []
    """Of a failing call: the ops that run inside what fails of it."""
    because: str = ""
    """The failing call whose op runs inside this one, where that explains its failure."""
    equal: list[str] = []
    """Other calls that are the same in op, shapes, dtypes and arguments: this result stands for them too."""
    source: Frame | None = None
    elapsed_s: float = 0.0
    data: str = ""
    """random or real; real also where random data mean nothing to the op, and empty where nothing was run."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Error that a call, or the calls of a module together, add themselves, in units of their dtype's eps."""

    kind: Literal["call", "module"]
    name: str
    error: float
    """Of a call: of its worst output or gradient. Of a module: the root of the sum of squares of its calls' errors."""
    dtype: str
    module: str = ""
    calls: int = 1


class Precheck(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Counts are of calls, equal ones included."""

    schema_version: int
    tool: str
    run: str
    device: str
    data: str
    standard: str
    exit_code: int
    """0: nothing failed; 1: something did; 2: not one call could be checked."""
    calls: int
    distinct: int
    passed: int
    failed: int
    skipped: int
    reasons: dict[str, int]
    """Why calls were skipped → how many."""
    backward_passed: int
    backward_failed: int
    checks: list[CallCheck]
    output: str | None
    notes: list[str]
    elapsed_s: float

    def __post_init__(self) -> None:
        counts, reasons = (self.passed, self.failed, self.skipped), self.reasons.values()
        if min(*counts, *reasons, 0) < 0 or sum(counts) != self.calls or sum(reasons) != self.skipped:
            raise ValueError(f"its counts do not add up: {self.calls} calls, {counts} passed, failed and skipped")


class Audit(Precheck, frozen=True, kw_only=True):
    """The answer of an audit."""

    losses: list[Loss]
    """Calls and modules in which most precision is lost, the worst first."""

"""What comparing two runs gives: a row for each pair of slots, findings, and the answer.

`compare` measures, `judge` gives verdicts, `report` words them; all three speak these structs. A row holds facts
(figures) and, once judged, an opinion (verdict, measured, allowed) in separate fields.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tensorprobe.model.call import Direction, Side
from tensorprobe.model.level import Level
from tensorprobe.model.stack import Frame

Verdict = Literal["agrees", "diverges", "unmeasured"]
"""Of a pair of slots."""
Status = Literal["agrees", "introduced", "inherited", "amplified", "structural", "unmeasured"]
"""Of a pair of calls."""
STATUSES: tuple[Status, ...] = ("agrees", "introduced", "inherited", "amplified", "structural", "unmeasured")
Basis = Literal["values", "digest", "statistics", "none"]
"""What a row was measured from: both tensors, equal digests, only their statistics, nothing."""
Inputs = Literal["identical", "agree", "diverge", "unknown"]
Answer = Literal["agrees", "diverged", "unmeasured"]
"""`unmeasured`: nothing diverges, and no result was measured; that is no agreement."""

SCHEMA_VERSION = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of slots: where, what was measured, what the policy says. Figures that were not measured are NaN or -1."""

    step: int
    rank: int
    index: int
    call: str
    candidate_call: str
    repeat: int
    level: Level
    direction: Direction
    module: str
    slot: str
    side: Side
    baseline_dtype: str
    candidate_dtype: str
    baseline_shape: str
    candidate_shape: str
    basis: Basis
    bit_identical: bool
    count: int
    different: int
    max_abs: float
    max_abs_index: int
    max_rel: float
    mean_abs: float
    relative_l2: float
    one_minus_cosine: float
    norm_ratio: float
    bias: float
    bias_z: float
    slope: float
    slope_z: float
    within_1e4: float
    within_1e3: float
    within_5e3: float
    within_1e2: float
    ulp_max: float
    ulp_mean: float
    ulp_over_1: float
    ulp_over_4: float
    nonfinite_different: int
    nonfinite_index: int
    baseline_max: float
    baseline_min: float
    baseline_mean: float
    baseline_norm: float
    baseline_nan: int
    baseline_inf: int
    candidate_max: float
    candidate_min: float
    candidate_mean: float
    candidate_norm: float
    candidate_nan: int
    candidate_inf: int
    verdict: Verdict
    judged_by: str
    measured: float
    allowed: float
    status: Status
    note: str = ""


COLUMNS: dict[str, str] = {
    "step": "training step",
    "rank": "rank of the process",
    "index": "line of the call in the baseline's calls.jsonl, from 0",
    "call": "name of the call in the baseline",
    "candidate_call": "name of its partner in the candidate",
    "repeat": "how often the call had been recorded before in the step",
    "level": "module, api or aten",
    "direction": "forward or backward",
    "module": "module in which the call was made",
    "slot": "place of the tensor in the call",
    "side": "input, output or parameters",
    "baseline_dtype": "element type in the baseline",
    "candidate_dtype": "element type in the candidate; when it differs, values are compared in the wider one",
    "baseline_shape": "shape in the baseline",
    "candidate_shape": "shape in the candidate",
    "basis": "measured from: values, digest (equal, so not read), statistics, none",
    "bit_identical": "whether both hold the same bits; where there is no digest, whether all statistics are equal",
    "count": "elements that are finite on both sides",
    "different": "elements whose values differ",
    "max_abs": "greatest absolute error",
    "max_abs_index": "where it is: flat index in row-major order",
    "max_rel": "greatest error relative to the baseline's element, where that is not zero",
    "mean_abs": "mean absolute error",
    "relative_l2": "norm of the difference over norm of the baseline",
    "one_minus_cosine": "1 - cosine, from the difference: right down to 1e-17",
    "norm_ratio": "norm of the candidate over norm of the baseline",
    "bias": "mean of candidate - baseline",
    "bias_z": "bias over its standard error",
    "slope": "factor by which the baseline is best scaled to give the candidate",
    "slope_z": "slope - 1 over its standard error",
    "within_1e4": "share of elements with a relative error of at most 1e-4",
    "within_1e3": "the same for 1e-3",
    "within_5e3": "the same for 5e-3",
    "within_1e2": "the same for 1e-2",
    "ulp_max": "greatest distance in units of the last place, of the coarser dtype",
    "ulp_mean": "mean distance in units of the last place",
    "ulp_over_1": "share of elements more than 1 unit apart",
    "ulp_over_4": "share of elements more than 4 units apart",
    "nonfinite_different": "places where one side is NaN or infinite and the other is not the same",
    "nonfinite_index": "the first of them: flat index in row-major order",
    "baseline_max": "maximum, NaN passed over",
    "baseline_min": "minimum, NaN passed over",
    "baseline_mean": "mean of the finite elements",
    "baseline_norm": "norm of the finite elements",
    "baseline_nan": "number of NaN",
    "baseline_inf": "number of infinities",
    "candidate_max": "as for the baseline",
    "candidate_min": "as for the baseline",
    "candidate_mean": "as for the baseline",
    "candidate_norm": "as for the baseline",
    "candidate_nan": "as for the baseline",
    "candidate_inf": "as for the baseline",
    "verdict": "agrees, diverges or unmeasured, as the policy says",
    "judged_by": "the figure that decided",
    "measured": "its value",
    "allowed": "what the policy allowed",
    "status": "of the whole call: agrees, introduced, inherited, amplified, structural, unmeasured",
    "note": "why nothing was measured, or under which condition it was",
}
"""Every column of a result table, in order, with its meaning. The fields of `Row`."""

FindingKind = Literal["only_baseline", "only_candidate", "shape", "dtype", "arguments", "slots", "raised"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A difference of structure: a call without a partner, another shape, dtype or argument, an exception."""

    kind: FindingKind
    step: int
    rank: int
    index: int
    call: str
    module: str = ""
    detail: str = ""
    suggestion: str = ""
    source: Frame | None = None


class External(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that differs before any recorded call has made it: a parameter, or data that the program read."""

    kind: Literal["parameter", "data"]
    name: str
    step: int
    rank: int
    call: str
    slot: str
    detail: str
    """`scaled by 1.01`, `shifted by 0.5`, or the size of the error."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where the runs part: a call, its worst output, whether its inputs agreed, where in the user's program."""

    step: int
    rank: int
    index: int
    call: str
    candidate_call: str
    level: Level
    direction: Direction
    module: str
    status: Status
    inputs: Inputs
    input_error: float
    """The greatest relative L2 error among the inputs."""
    row: Row | None = None
    """The output that diverges most; None when the call is different in structure."""
    place: list[int] = []
    """Index of the greatest error in that output."""
    source: Frame | None = None
    finding: Finding | None = None


class Buckets(msgspec.Struct, kw_only=True):
    """Where every call of both runs went; `paired` counts pairs. `skipped`: words of `model.reason.Skipped` → count."""

    paired: int = 0
    only_baseline: int = 0
    only_candidate: int = 0
    skipped: dict[str, int] = {}

    def add(self, more: Buckets) -> None:
        """Add the counts of another part of the comparison."""
        self.paired += more.paired
        self.only_baseline += more.only_baseline
        self.only_candidate += more.only_candidate
        for reason, count in more.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank by itself."""

    rank: int
    answer: Answer
    divergence: Divergence | None
    statuses: dict[str, int]


class RunSide(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs, for the coverage line."""

    path: str
    calls: int
    closed: bool
    devices: list[str]
    torch: str
    mode: str
    seen: int
    recorded: int
    filtered: int
    failed: int
    blind_spots: dict[str, int]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and everything that a report says. `tensorprobe compare --json` prints it."""

    schema_version: int
    tool: str
    policy: str
    answer: Answer
    exit_code: int
    divergence: Divergence | None
    first_difference: Divergence | None
    """The first call whose outputs differ in any bit while its inputs are identical, whatever the policy allows."""
    externals: list[External]
    findings: list[Finding]
    findings_total: int
    ranks: list[RankAnswer]
    steps: list[int]
    buckets: Buckets
    statuses: dict[str, int]
    """Of the pairs: status → number of calls."""
    rows: int
    bases: dict[str, int]
    """Basis → number of rows."""
    notes: list[str]
    baseline: RunSide
    candidate: RunSide
    output: str | None
    elapsed_s: float

"""What comparing two runs gives: a row for each pair of slots, findings, and the answer.

`compare` measures, `judge` gives verdicts, `report` words them; all three speak these structs. A row holds facts
(figures) and, once judged, an opinion (verdict, measured, allowed) in separate fields.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

from tensorprobe.model.call import Direction, Frame, Side
from tensorprobe.model.diff import Pattern
from tensorprobe.model.level import Level

Verdict = Literal["agrees", "diverges", "unmeasured"]
"""Of a pair of slots."""
Status = Literal["agrees", "introduced", "entered", "inherited", "amplified", "structural", "unmeasured"]
"""Of a pair of calls."""
STATUSES: tuple[Status, ...] = (
    "agrees", "introduced", "entered", "inherited", "amplified", "structural", "unmeasured"
)  # fmt: skip
Basis = Literal["values", "digest", "statistics", "none"]
"""What a row was measured from: both tensors, equal digests, only their statistics, nothing."""
Inputs = Literal["identical", "agree", "diverge", "unknown"]
Answer = Literal["agrees", "diverged", "unclear", "unmeasured", "unfinished"]
"""`unclear`: something differs, and the record does not show whether it may. `unmeasured`: nothing diverges, and no result was
measured; that is no agreement. `unfinished`: what both runs have agrees, and one of them ends before the other."""

SCHEMA_VERSION = 1
ERROR, RATIO, COUNT = ".1e", ".6g", ",.3g"
"""How a number is printed."""


class Column(NamedTuple):
    """What is known of one column of the result table. A column with `equal` is a figure: it is measured."""

    meaning: str
    equal: float | None = None
    """The value for two equal tensors."""
    judged: bool = False
    """Whether a policy may judge by it: by its distance from `equal` (`bit_identical` as 1 when bits differ)."""
    words: str = ""
    """What reports call it; the name itself when empty."""
    form: str = RATIO


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of slots: where, what was measured, what the policy says. Figures that were not measured are NaN or -1.

    This is the one table of columns: types, documentation, the schemas of files and the figures of equal tensors follow
    from it. `numerics.pairs.derive` computes the figures.
    """

    # fmt: off
    step: Annotated[int, Column("training step")]
    rank: Annotated[int, Column("rank of the process")]
    index: Annotated[int, Column("line of the call in the baseline's calls.jsonl, from 0")]
    call: Annotated[str, Column("name of the call in the baseline")]
    candidate_call: Annotated[str, Column("name of its partner in the candidate")]
    repeat: Annotated[int, Column("how many times the call was recorded before in this step")]
    level: Annotated[Level, Column("module, api or aten")]
    direction: Annotated[Direction, Column("forward or backward")]
    module: Annotated[str, Column("module in which the call was made")]
    slot: Annotated[str, Column("position of the tensor in the call")]
    side: Annotated[Side, Column("input, output or parameters")]
    baseline_dtype: Annotated[str, Column("element type in the baseline")]
    candidate_dtype: Annotated[str, Column(
        "element type in the candidate; when it differs, values are compared in the wider one")]
    baseline_shape: Annotated[str, Column("shape in the baseline")]
    candidate_shape: Annotated[str, Column("shape in the candidate")]
    basis: Annotated[Basis, Column("measured from: values, digest (equal, so not read), statistics, none")]
    bit_identical: Annotated[bool, Column(
        "whether both hold the same bits; where there is no digest, whether all statistics are equal",
        equal=True, judged=True)]
    count: Annotated[int, Column("number of elements that are finite on both sides")]
    different: Annotated[int, Column(
        "number of elements whose values differ", equal=0, judged=True, words="elements that differ", form=COUNT)]
    max_abs: Annotated[float, Column("greatest absolute error", equal=0.0, judged=True, words="max |Δ|", form=ERROR)]
    max_abs_index: Annotated[int, Column("flat index of max_abs, in row-major order")]
    max_rel: Annotated[float, Column(
        "greatest error relative to the baseline's element, where that is not zero",
        equal=0.0, judged=True, words="greatest relative error", form=ERROR)]
    mean_abs: Annotated[float, Column("mean absolute error", equal=0.0, judged=True, words="mean |Δ|", form=ERROR)]
    relative_l2: Annotated[float, Column(
        "norm of the difference over norm of the baseline", equal=0.0, judged=True, words="relative L2", form=ERROR)]
    one_minus_cosine: Annotated[float, Column(
        "1 - cosine, computed from the difference: accurate down to 1e-17", equal=0.0, judged=True, words="1 - cosine", form=ERROR)]
    norm_ratio: Annotated[float, Column(
        "norm of the candidate over norm of the baseline",
        equal=1.0, judged=True, words="norm ratio off 1 by", form=ERROR)]
    bias: Annotated[float, Column("mean of candidate - baseline", equal=0.0, judged=True, words="bias", form=ERROR)]
    bias_z: Annotated[float, Column(
        "bias over its standard error", equal=0.0, words="bias in standard errors", form=COUNT)]
    slope: Annotated[float, Column(
        "factor that scales the baseline to fit the candidate best",
        equal=1.0, judged=True, words="slope off 1 by", form=ERROR)]
    slope_z: Annotated[float, Column(
        "slope - 1 over its standard error", equal=0.0, words="slope - 1 in standard errors", form=COUNT)]
    within_1e4: Annotated[float, Column(
        "share of elements with a relative error of at most 1e-4",
        equal=1.0, words="share of elements off by more than 1e-4:", form=RATIO)]
    within_1e3: Annotated[float, Column(
        "the same for 1e-3", equal=1.0, words="share of elements off by more than 1e-3:", form=RATIO)]
    within_5e3: Annotated[float, Column("the same for 5e-3", equal=1.0)]
    within_1e2: Annotated[float, Column(
        "the same for 1e-2", equal=1.0, words="share of elements off by more than 1e-2:", form=RATIO)]
    ulp_max: Annotated[float, Column(
        "greatest distance in units in the last place (ULP) of the coarser dtype",
        equal=0.0, judged=True, words="greatest distance in ULP", form=COUNT)]
    ulp_mean: Annotated[float, Column(
        "mean distance in ULP", equal=0.0, judged=True, words="mean distance in ULP", form=COUNT)]
    ulp_over_1: Annotated[float, Column(
        "share of elements more than 1 ULP apart",
        equal=0.0, judged=True, words="share of elements more than 1 ULP apart", form=COUNT)]
    ulp_over_4: Annotated[float, Column(
        "share of elements more than 4 ULP apart",
        equal=0.0, judged=True, words="share of elements more than 4 ULP apart", form=COUNT)]
    nonfinite_different: Annotated[int, Column(
        "places where one side is NaN or infinite and the other is not the same", equal=0, judged=True)]
    nonfinite_index: Annotated[int, Column("flat index of the first of them, in row-major order")]
    set_apart: Annotated[int, Column(
        "number of elements with a huge value that both sides share, as in a mask; no other figure covers them")]
    baseline_max: Annotated[float, Column("maximum, ignoring NaN")]
    baseline_min: Annotated[float, Column("minimum, ignoring NaN")]
    baseline_mean: Annotated[float, Column("mean of the finite elements")]
    baseline_norm: Annotated[float, Column("norm of the finite elements")]
    baseline_nan: Annotated[int, Column("number of NaN")]
    baseline_inf: Annotated[int, Column("number of infinities")]
    candidate_max: Annotated[float, Column("as for the baseline")]
    candidate_min: Annotated[float, Column("as for the baseline")]
    candidate_mean: Annotated[float, Column("as for the baseline")]
    candidate_norm: Annotated[float, Column("as for the baseline")]
    candidate_nan: Annotated[int, Column("as for the baseline")]
    candidate_inf: Annotated[int, Column("as for the baseline")]
    verdict: Annotated[Verdict, Column("agrees, diverges or unmeasured, as the policy says")]
    judged_by: Annotated[str, Column("the figure that decided")]
    measured: Annotated[float, Column("its value")]
    allowed: Annotated[float, Column("what the policy allowed")]
    status: Annotated[Status, Column(
        "of the whole call: agrees, introduced, entered, inherited, amplified, structural, unmeasured")]
    note: Annotated[str, Column("why nothing was measured, or under which condition")] = ""
    producer: Annotated[int, Column(
        "line of the call before that made the tensor, in the baseline; -1 if the call itself or none in this step did")] = -1
    # fmt: on


_ANNOTATIONS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Row, include_extras=True).items()}
COLUMNS: dict[str, str] = {name: column.meaning for name, column in _ANNOTATIONS.items()}
"""Every column of a result table, in order, with its meaning."""
FIGURES: dict[str, Column] = {name: column for name, column in _ANNOTATIONS.items() if column.equal is not None}
"""The columns that compare two tensors with each other."""

FindingKind = Literal["only_baseline", "only_candidate", "shape", "dtype", "arguments", "slots", "received", "raised"]


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
    parent: str = ""
    """Of a call without a partner: the call that it is a part of, as attention is made of products."""
    region: str = ""
    """Of a call without a partner: the region that it belongs to."""
    source: Frame | None = None


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Calls without a partner between the same paired tensors, measured as if they were one call."""

    name: str
    step: int
    rank: int
    module: str
    baseline: list[str]
    """The names of its calls."""
    candidate: list[str]
    begins: bool
    """Whether an error begins in it: what it reads agrees, and what it makes does not."""
    agrees: bool
    """Whether what it makes agrees; neither if it inherits an error."""
    measured: bool
    """Whether something of what it makes was compared; a copy that no paired call reads is not."""

    @property
    def calls(self) -> int:
        """The number of calls on both sides."""
        return len(self.baseline) + len(self.candidate)


ExternalKind = Literal["parameter", "data", "gradient", "input"]
"""`input`: what a call made in one run is not what is read in the other."""


class External(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that differs where it enters a call, although no recorded call has made the difference."""

    kind: ExternalKind
    name: str
    step: int
    rank: int
    call: str
    slot: str
    detail: str
    """`scaled by 1.01`, `shifted by 0.5`, `transposed`, or the size of the error."""
    origin: str = ""
    """What is known of where it comes from: `Functional.gelu.0.forward, which made it, agrees`."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """One call of both runs, recomputed in float64 from its own recorded inputs: the relative L2 error of each side."""

    slot: str
    baseline: float
    candidate: float
    baseline_wrong: bool
    """Whether the error is beyond what its dtype must lose."""
    candidate_wrong: bool
    random: bool = False
    """Whether the call draws random numbers. Then `wrong` says that they do not follow its law; no slot: nobody knows."""

    @property
    def at_fault(self) -> bool:
        """Whether one side is wrong and the other is not."""
        return self.baseline_wrong != self.candidate_wrong


class RegionProof(msgspec.Struct, frozen=True, kw_only=True):
    """What replays in float64 say of the calls of a region, each from its own recorded inputs."""

    right: int
    """Calls of both sides that are right by themselves."""
    wrong: list[str]
    """`candidate Torch.mul.3.forward`: those that are not."""
    unproved: dict[str, int]
    """Why other calls could not be replayed → how many."""


class Proving(msgspec.Struct, kw_only=True):
    """How much of a comparison was proved."""

    replayed: int = 0
    """Calls with a proof."""
    withdrawn: int = 0
    """Calls that were inferred to introduce an error, and are within rounding of float64 on both sides."""
    unreached: int = 0
    """Calls beyond the budget."""
    unprovable: dict[str, int] = {}
    """Why calls could not be replayed → how many."""

    def add(self, more: Proving) -> None:
        """Add the counts of another part of the comparison."""
        self.replayed += more.replayed
        self.withdrawn += more.withdrawn
        self.unreached += more.unreached
        for reason, count in more.unprovable.items():
            self.unprovable[reason] = self.unprovable.get(reason, 0) + count


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
    proof: Proof | None = None
    """What a replay in float64 says of it; None where it was not replayed."""
    unproved: str = ""
    """Why no replay could decide; empty where one did, or none was wanted."""
    pattern: Pattern | None = None
    """Where in that output the elements differ; None if they have nothing in common, or its values were not looked at."""
    entered: External | None = None
    """The input that differs, of a call with the status `entered`."""
    region: Region | None = None
    """The calls of both runs between the same tensors, of which this is the first, and which give different results."""
    region_proof: RegionProof | None = None
    """What replays say of the calls of that region; None where none was replayed."""
    random: bool = False
    """Whether it draws random numbers, and is not known to be wrong: the runs may have other random streams."""


class Buckets(msgspec.Struct, kw_only=True):
    """Where every call of both runs went; `paired` counts pairs. `skipped`: words of `model.reason.Skipped` → count."""

    paired: int = 0
    in_regions: int = 0
    only_baseline: int = 0
    only_candidate: int = 0
    skipped: dict[str, int] = {}

    def add(self, more: Buckets) -> None:
        """Add the counts of another part of the comparison."""
        self.paired += more.paired
        self.in_regions += more.in_regions
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


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a run that did not finish, and whose missing part the other run has."""

    run: Literal["baseline", "candidate"]
    rank: int
    whole: int
    """The last step that is whole; -1 when there is none."""
    step: int | None
    """The step of which only a part was recorded; None when it ends between two steps."""
    raised: str
    """The exception that ended it, or its exit code; empty when it was killed, or is still running."""


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
    """What differs where it enters the calls: parameters, data, gradients, inputs."""
    untold: list[External]
    """The same, where the record does not show whether it may differ."""
    findings: list[Finding]
    """Differences of structure that no region explains."""
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
    proving: Proving = msgspec.field(default_factory=Proving)
    replay: str = ""
    """The script in the output folder that runs the diverging call alone; empty where there is none."""
    regions: list[Region] = []
    """Where both programs compute the same with different calls, or are meant to."""
    regions_total: int = 0
    endings: list[Ending] = []
    """Where a run ends before the other."""
    differing: list[str] = []
    """What differs about the programs, as `threads: 1 / 8`: command, code, packages, environment, switches."""

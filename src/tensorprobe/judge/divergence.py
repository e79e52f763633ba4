"""Finds the first divergence of a step, of a rank, and of all ranks from the statuses of calls.

Within a step calls are in execution order. Across ranks the order is by collectives: what a rank did before its third
all-reduce comes before what another did after its third one, whatever their numbers. A collective that spreads an error
from another rank has not introduced it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy

from tensorprobe.judge.graph import Graph
from tensorprobe.model import Level
from tensorprobe.model.call import op_of
from tensorprobe.model.comparison import STATUSES, Basis, Divergence, External, Finding, Inputs, Region, Row, Status
from tensorprobe.model.measured import (
    BASES,
    DIVERGES,
    INPUTS,
    JUDGED,
    SIDES,
    STATISTICS,
    UNMEASURED,
    VERDICTS,
    Entering,
    Measured,
    Opinions,
)
from tensorprobe.ops import Trait, argument_name, has, is_collective, module_path

MAX_EXTERNALS = 100

_AGREES, _INTRODUCED, _ENTERED, _STRUCTURAL, _UNMEASURED = (
    STATUSES.index(name) for name in ("agrees", "introduced", "entered", "structural", "unmeasured")
)
_HARMLESS = (STATUSES.index("agrees"), STATUSES.index("amplified"))
_UNPAIRED = ("only_baseline", "only_candidate")


Place = tuple[int, int, bool, int, int]
_STATISTICS_ROUNDING = 1e-6
"""How far norms of equal tensors may be apart that were computed in different ways."""
_PURE_SCALE = 1e-9
"""If 1 - cosine is below this, the difference is a pure scale."""


class Candidate(msgspec.Struct, frozen=True):
    """A divergence with its position in the order across ranks."""

    divergence: Divergence
    epoch: int
    """Collectives that the rank had started before in this step."""
    collective: bool
    stacks: tuple[int | None, int | None] = (None, None)
    """Of baseline and candidate. A backward call has those of its forward call."""

    @property
    def place(self) -> Place:
        """Sort key of divergences across ranks: possible causes come first."""
        at = self.divergence
        return at.step, self.epoch, self.collective, at.index, at.rank


class StepAnswer(msgspec.Struct, kw_only=True):
    """The answer of one step of one rank, without its rows."""

    step: int
    rank: int
    introduced: Candidate | None
    random: Candidate | None
    """The first call that drew other random numbers, as far as is known."""
    entered: Candidate | None
    structural: Candidate | None
    diverging: Candidate | None
    difference: Candidate | None
    statuses: dict[Status, int]
    bases: dict[Basis, int]
    rows: int
    judged: int
    """Results with a verdict."""
    externals: list[External]
    untold: list[External]
    unseen_updates: int
    regions: list[Region]
    findings: list[Finding]
    """Without those that a region explains."""


@dataclass
class _Step:
    """A measured and judged step, call by call."""

    measured: Measured
    opinion: Opinions
    epochs: Any = field(init=False)

    def __post_init__(self) -> None:
        collective = [is_collective(name) for name in self.measured.calls.name]
        self.epochs = numpy.cumsum([0, *collective[:-1]]) if collective else numpy.zeros(0, dtype=numpy.int64)

    def candidate(self, call: int, finding: Finding | None = None) -> Candidate:
        calls, opinion = self.measured.calls, self.opinion
        row, entered = worst_row(self.measured, opinion, call), None
        if opinion.status[call] == _ENTERED:
            entering = next(each for each in opinion.entering if each.call == call)
            row, entered = entering.row, _external_of(self.measured, entering)
        divergence = Divergence(
            step=self.measured.step,
            rank=self.measured.rank,
            index=calls.index[call],
            call=calls.name[call],
            candidate_call=calls.candidate[call],
            level=calls.level[call],
            direction=calls.direction[call],  # type: ignore[arg-type]
            module=calls.module[call],
            status=STATUSES[opinion.status[call]],
            inputs=cast(Inputs, INPUTS[opinion.inputs[call]]),
            input_error=float(opinion.input_error[call]),
            row=None if row is None else make_row(self.measured, opinion, row),
            place=[] if row is None else place_in(self.measured, row),
            finding=finding,
            proof=opinion.proofs.get(call),
            unproved=opinion.unproved.get(call, "") if opinion.status[call] == STATUSES.index("introduced") else "",
            entered=entered,
            random=self.is_random(call),
        )
        forward = calls.forward[call]
        made = forward if forward >= 0 and calls.stack[call] is None and calls.candidate_stack[call] is None else call
        return Candidate(
            divergence,
            int(self.epochs[call]),
            is_collective(calls.name[call]),
            (calls.stack[made], calls.candidate_stack[made]),
        )

    def is_random(self, call: int) -> bool:
        """Return whether a call that introduces a difference may only have another random stream."""
        proof = self.opinion.proofs.get(call)
        if self.opinion.status[call] != _INTRODUCED or (proof is not None and proof.at_fault):
            return False
        return has(self.measured.calls.op[call], Trait.RANDOM) if proof is None else proof.random

    def is_settled(self, finding: Finding) -> bool:
        """Return whether a call without a partner is part of an API call or a region that agrees: another way to a result.

        Versions of torch differ in what their composite functions, such as attention, are made of.
        """
        if finding.region:
            return finding.region not in self.begun
        if self.measured.other_layout and is_collective(finding.call):
            return True
        return finding.parent in self._agreeing[finding.kind == "only_candidate"]

    @functools.cached_property
    def begun(self) -> dict[str, int]:
        """The regions in which an error begins, by name → the call that stands for them."""
        names, status = self.measured.calls.name, self.opinion.status
        wrong = [call for call in self.measured.region_positions if status[call] in (_INTRODUCED, _STRUCTURAL)]
        found = {names[call].rsplit(".", 1)[0]: call for call in reversed(wrong)}
        return found | self._begun_around

    @functools.cached_property
    def _begun_around(self) -> dict[str, int]:
        """The regions of calls of modules of which nothing was measured, if the module around them diverges → its call."""
        calls, found = self.measured.calls, {}
        for region in self.measured.regions.keys() - self._measured_regions.keys():
            paths = {module_path(op_of(name)) for side in self.measured.regions[region] for name in side} - {""}
            around = [
                call
                for call, level in enumerate(calls.level)
                if level.is_module and any(is_around(module_path(calls.op[call]), path) for path in paths)
            ]
            wrong = [call for call in around if self.opinion.status[call] not in (*_HARMLESS, _UNMEASURED)]
            if wrong:
                found[region] = wrong[0]
        return found

    @functools.cached_property
    def _agreeing(self) -> tuple[set[str], set[str]]:
        calls = self.measured.calls
        agree = [
            call
            for call, status in enumerate(self.opinion.status)
            if status == _AGREES and calls.level[call] == Level.API
        ]
        return {calls.name[call] for call in agree}, {calls.candidate[call] for call in agree}

    @functools.cached_property
    def _measured_regions(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for call in self.measured.region_positions:
            found.setdefault(self.measured.calls.name[call].rsplit(".", 1)[0], []).append(call)
        return found

    def region(self, name: str) -> Region:
        """Return what is known of a region."""
        measured = self.measured
        ours, theirs = measured.regions[name]
        return Region(
            name=name,
            step=measured.step,
            rank=measured.rank,
            module=name.partition(".")[2].rpartition(".")[0],
            baseline=ours,
            candidate=theirs,
            begins=name in self.begun,
            agrees=name not in self.begun
            and all(
                self.opinion.status[call] in _HARMLESS
                or (measured.other_layout and self.opinion.status[call] == _UNMEASURED)
                for call in self._measured_regions.get(name, ())
            ),
            measured=any(self.opinion.status[call] != _UNMEASURED for call in self._measured_regions.get(name, ())),
        )

    def unpaired(self, finding: Finding) -> Candidate:
        """Return the divergence of a call without a partner, at its position in its own run."""
        calls = self.measured.calls
        before = sum(index < finding.index for index in calls.index)
        epoch = int(self.epochs[min(before, len(self.epochs) - 1)]) if len(self.epochs) else 0
        parts = finding.call.rsplit(".", 2)
        direction = "backward" if "backward" in parts[-2:] else "forward"
        only_candidate = finding.kind == "only_candidate"
        region = self.begun.get(finding.region)
        row = None if region is None else worst_row(self.measured, self.opinion, region)
        divergence = Divergence(
            step=finding.step,
            rank=finding.rank,
            index=finding.index,
            call="" if only_candidate else finding.call,
            candidate_call=finding.call if only_candidate else "",
            level=Level.of(finding.call),
            direction=direction,  # type: ignore[arg-type]
            module=finding.module,
            status="structural",
            inputs="unknown" if region is None else cast(Inputs, INPUTS[self.opinion.inputs[region]]),
            input_error=0.0 if region is None else float(self.opinion.input_error[region]),
            row=None if row is None else make_row(self.measured, self.opinion, row),
            place=[] if row is None else place_in(self.measured, row),
            finding=finding,
            region=None if region is None else self.region(finding.region),
            random=region is not None
            and finding.region not in self.measured.idle
            and any(has(op_of(name), Trait.RANDOM) for name in self.measured.region_calls(region)),
        )
        return Candidate(divergence, epoch, is_collective(finding.call))

    def lacks(self, entered: Candidate, paired: Candidate) -> bool:
        """Return whether a gradient enters as a sum without the part that an earlier call gives on one side only."""
        index = self.measured.calls.index
        reader = self.measured.calls.forward[index.index(paired.divergence.index)]
        row = next(each.row for each in self.opinion.entering if index[each.call] == entered.divergence.index)
        return reader >= 0 and paired.place < entered.place and Graph(self.measured).lacks_a_part(row, reader)


def is_around(module: str, path: str) -> bool:
    """Return whether a module holds another one."""
    return path.startswith(f"{module}.") if module else bool(path)


def conclude_step(measured: Measured, opinion: Opinions) -> StepAnswer:
    """Return the first call of each kind in one step, counts, and the tensors that differ where they enter."""
    step = _Step(measured, opinion)
    rows, calls = measured.rows, measured.calls
    status = opinion.status
    diverging = numpy.zeros(len(calls.name), dtype=bool)
    numpy.logical_or.at(diverging, rows.call, (opinion.verdict == DIVERGES) & rows.made)
    diverging[[each.call for each in opinion.entering]] = True
    about = {finding.index: finding for finding in reversed(measured.findings) if finding.kind not in _UNPAIRED}

    def first(mask: Any) -> Candidate | None:
        hits = numpy.flatnonzero(mask)
        return step.candidate(int(hits[0]), about.get(calls.index[hits[0]])) if len(hits) else None

    alone = numpy.ones(len(calls.name), dtype=bool)
    alone[measured.region_positions] = False
    random = numpy.zeros(len(calls.name), dtype=bool)
    for call in numpy.flatnonzero(status == _INTRODUCED).tolist():
        random[call] = step.is_random(call)
    paired = first((status == _STRUCTURAL) & alone)
    unpaired = min(
        (finding for finding in measured.findings if finding.kind in _UNPAIRED and not step.is_settled(finding)),
        key=lambda one: one.index,
        default=None,
    )
    structural = [one for one in (paired, step.unpaired(unpaired) if unpaired else None) if one is not None]
    entered = first(status == _ENTERED)
    if entered is not None and paired is not None and step.lacks(entered, paired):
        entered = paired
    counts = numpy.bincount(status[alone], minlength=len(STATUSES))
    bases = numpy.bincount(rows.basis, minlength=len(BASES))
    return StepAnswer(
        step=measured.step,
        rank=measured.rank,
        introduced=first((status == _INTRODUCED) & alone & ~random),
        random=first(random & alone),
        entered=entered,
        structural=min(structural, key=lambda one: one.divergence.index, default=None),
        diverging=first(diverging & (status != _INTRODUCED) & alone),
        difference=first(_bit_differences(measured, opinion) & alone),
        statuses={name: int(count) for name, count in zip(STATUSES, counts, strict=True)},
        bases={name: int(count) for name, count in zip(BASES, bases, strict=True)},
        rows=len(rows.slot),
        judged=int((rows.made & (opinion.verdict != UNMEASURED)).sum()) + opinion.whole,
        regions=[step.region(name) for name in measured.regions],
        findings=[finding for finding in measured.findings if not (finding.region and step.is_settled(finding))],
        externals=[_external_of(measured, each) for each in opinion.entering[:MAX_EXTERNALS]],
        untold=[_external_of(measured, each) for each in opinion.untold[:MAX_EXTERNALS]],
        unseen_updates=opinion.unseen_updates,
    )


def _bit_differences(measured: Measured, opinion: Opinions) -> Any:
    """Return the calls with an output that differs in some bit although all inputs are identical."""
    rows = measured.rows
    differs = numpy.zeros(len(measured.calls.name), dtype=bool)
    changed = rows.made & (rows.basis != BASES.index("none")) & ~rows.figures["bit_identical"].astype(bool)
    # Without digests only the statistics show it, and those of equal tensors may be rounded differently.
    figures = rows.figures
    apart = rows.other_bits | (numpy.abs(figures["norm_ratio"] - 1) > _STATISTICS_ROUNDING)
    for name in ("max", "min"):
        apart |= figures[f"baseline_{name}"] != figures[f"candidate_{name}"]
    changed &= (rows.basis != BASES.index("statistics")) | apart
    numpy.logical_or.at(differs, rows.call, changed)
    return differs & (opinion.inputs == INPUTS.index("identical"))


def first_divergence(answers: Sequence[StepAnswer]) -> Candidate | None:
    """Return the first divergence of the steps of one rank, or of all ranks.

    The first cause, an error that is introduced or that enters, comes first, unless in an earlier step something diverges
    already; then a difference of structure; then the first call that diverges at all. All that follows a random op differs for
    that, so another call that introduces an error comes before it, wherever it stands.
    """

    def earliest(name: str) -> Candidate | None:
        held = [one for answer in answers if (one := getattr(answer, name)) is not None]
        return min(held, key=lambda one: one.place, default=None)

    names = ("introduced", "entered", "structural", "diverging")
    introduced, entered, structural, diverging = (earliest(name) for name in names)
    random = earliest("random")
    causes = [one for one in (introduced, entered, random) if one is not None]
    bound = diverging.divergence.step if diverging else None
    cause = min(causes, key=lambda one: one.place, default=None)
    if cause is not None and cause is random and introduced is not None:
        return introduced
    for one in (cause, structural):
        if one is not None and (bound is None or one.divergence.step <= bound):
            return one
    return diverging


def earliest_difference(answers: Sequence[StepAnswer]) -> Candidate | None:
    """Return the first call, over all ranks, whose outputs differ in any bit while its inputs are identical."""
    held = [answer.difference for answer in answers if answer.difference is not None]
    return min(held, key=lambda one: one.place, default=None)


def settle_ranks(answers: Sequence[StepAnswer]) -> list[StepAnswer]:
    """Return the answers of all ranks. A collective is not blamed if another rank diverged before it."""
    causes = sorted(
        (one.place, answer.rank)
        for answer in answers
        for one in (answer.introduced, answer.random, answer.diverging)
        if one is not None and not one.collective
    )
    return [_without_spread(answer, causes) for answer in answers]


def _without_spread(answer: StepAnswer, causes: Sequence[tuple[Place, int]]) -> StepAnswer:
    blamed = answer.introduced
    if blamed is None or not blamed.collective:
        return answer
    if not any(rank != answer.rank and place < blamed.place for place, rank in causes):
        return answer
    inherited = msgspec.structs.replace(blamed.divergence, status="inherited")
    spread = msgspec.structs.replace(blamed, divergence=inherited)
    earliest = min((spread, answer.diverging or spread), key=lambda one: one.place)
    return msgspec.structs.replace(answer, introduced=None, diverging=earliest)


def worst_row(measured: Measured, opinion: Opinions, call: int) -> int | None:
    """Return the most telling row of a call: a diverging output, else a diverging input, else the largest ratio."""
    rows = measured.rows

    def weight(row: int) -> tuple[bool, bool, float]:
        allowed, value = float(opinion.allowed[row]), float(opinion.measured[row])
        ratio = value / allowed if allowed > 0 else float("inf") if value > 0 else 0.0
        return bool(opinion.verdict[row] == DIVERGES), bool(rows.made[row]), ratio

    return max(measured.rows_of(call), key=weight, default=None)


def make_row(measured: Measured, opinion: Opinions, row: int) -> Row:
    """Return one row of the result table."""
    calls, rows = measured.calls, measured.rows
    call = int(rows.call[row])
    figures = {name: column[row].item() for name, column in rows.figures.items()}
    return Row(
        step=measured.step,
        rank=measured.rank,
        index=calls.index[call],
        call=calls.name[call],
        candidate_call=calls.candidate[call],
        repeat=calls.repeat[call],
        level=calls.level[call],
        direction=calls.direction[call],  # type: ignore[arg-type]
        module=calls.module[call],
        slot=rows.slot[row],
        side=SIDES[rows.side[row]],  # type: ignore[arg-type]
        baseline_dtype=rows.dtype_names[0][row],
        candidate_dtype=rows.dtype_names[1][row],
        baseline_shape=str(list(rows.shapes[0][row])),
        candidate_shape=str(list(rows.shapes[1][row])),
        basis=BASES[rows.basis[row]],
        **(figures | {"bit_identical": bool(figures["bit_identical"])}),
        verdict=VERDICTS[opinion.verdict[row]],  # type: ignore[arg-type]
        judged_by=JUDGED[opinion.judged_by[row]],
        measured=float(opinion.measured[row]),
        allowed=float(opinion.allowed[row]),
        status=STATUSES[opinion.status[call]],
        note=rows.note[row],
    )


def place_in(measured: Measured, row: int) -> list[int]:
    """Return the index of the largest error, or of the first mismatch of NaN and inf."""
    figures, shape = measured.rows.figures, measured.rows.shapes[0][row]
    broken = figures["nonfinite_different"][row] > 0
    flat = int(figures["nonfinite_index" if broken else "max_abs_index"][row])
    if flat < 0:
        return []
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return place[::-1]


def _external_of(measured: Measured, entering: Entering) -> External:
    """Return which tensor differs where it enters a call, and how."""
    calls, rows = measured.calls, measured.rows
    call, slot = entering.call, rows.slot[entering.row]
    argument = argument_name(calls.op[call], slot)
    module = calls.module[call]
    role, _, owned = rows.roles.get(entering.row, "").partition(" ")
    if role in ("parameter", "buffer"):
        name = owned
    elif role == "gradient" and role not in slot:
        name = f"gradient of {owned}"
    elif argument and entering.kind in ("parameter", "data"):
        name = f"{module}.{argument}" if module else argument
    else:
        name = f"{slot} of {calls.name[call]}"
    return External(
        kind=entering.kind,
        name=name,
        step=measured.step + int(rows.made[entering.row]),  # what an optimizer made is read in the next step
        rank=measured.rank,
        call=calls.name[call],
        slot=slot,
        detail=_how_it_differs(measured, entering.row),
        origin=entering.origin,
    )


def _how_it_differs(measured: Measured, row: int) -> str:
    figures = {name: column[row] for name, column in measured.rows.figures.items()}
    if measured.rows.basis[row] == STATISTICS and figures["baseline_norm"] != figures["baseline_norm"]:
        return f"max {figures['baseline_max']:.6g} in baseline, {figures['candidate_max']:.6g} in candidate"
    if measured.rows.basis[row] == STATISTICS and figures["relative_l2"] > 0:
        return f"relative L2 about {figures['relative_l2']:.2g}, from a sketch"
    if measured.rows.basis[row] == STATISTICS:
        return f"norm {figures['baseline_norm']:.6g} in baseline, {figures['candidate_norm']:.6g} in candidate"
    if figures["nonfinite_different"] > 0:
        return f"NaN or infinity differs in {figures['nonfinite_different']:,} places"
    if figures["one_minus_cosine"] < _PURE_SCALE and abs(figures["slope"] - 1) >= 0.9 * figures["relative_l2"] > 0:
        return f"scaled by {figures['slope']:.6g}"
    if (
        figures["bias"]
        and abs(figures["mean_abs"] - abs(figures["bias"])) <= 1e-5 * figures["mean_abs"]
        and (figures["max_abs"] <= 1.001 * abs(figures["bias"]))
    ):
        return f"shifted by {figures['bias']:.6g}"
    share = figures["different"] / max(int(figures["count"]), 1)
    return f"max |Δ| {figures['max_abs']:.3g}, relative {figures['relative_l2']:.3g}, {share:.0%} of the elements"

"""Gathers the results of the ranks into the answer: the first divergence, counts, notes, coverage."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.engine.narrowing import describe_narrowing
from tensorprobe.engine.plan import Plan
from tensorprobe.engine.rank_task import RankResult
from tensorprobe.errors import NotFound, NothingPaired, OtherLayout, RunDamaged
from tensorprobe.judge.divergence import Candidate, StepAnswer, earliest_difference, first_divergence, settle_ranks
from tensorprobe.model import Frame
from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import (
    SCHEMA_VERSION,
    STATUSES,
    Answer,
    Buckets,
    Comparison,
    Divergence,
    Finding,
    Proving,
    RankAnswer,
    RunSide,
)
from tensorprobe.model.diff import Pattern
from tensorprobe.model.measured import BASES
from tensorprobe.model.reason import Skipped
from tensorprobe.pairing.nearest import nothing_paired_hint
from tensorprobe.record import Run
from tensorprobe.record.endings import describe_end
from tensorprobe.record.provenance import differences
from tensorprobe.version import VERSION

MAX_FINDINGS = 200
"""The maximum findings in a summary; the rest is counted."""
_EXIT_CODES: dict[Answer, int] = {"agrees": 0, "diverged": 1, "unclear": 2, "unmeasured": 2, "unfinished": 2}
MAX_SOURCES = 20
"""The maximum findings whose source line is looked up."""
_TensorPlace = tuple[int, int, int, str]


def gather(
    runs: tuple[Run, Run], plan: Plan, results: Sequence[RankResult], *, output: Path | None, started: float
) -> Comparison:
    """Return the whole answer. Raises NothingPaired if no call has a partner."""
    buckets = _sum_buckets(plan, results)
    if not buckets.paired:
        raise _nothing_paired(runs, plan, buckets)
    answers = settle_ranks([answer for result in results for answer in result.answers])
    patterns = _patterns(results)
    divergence = _with_pattern(_with_source(first_divergence(answers), runs), patterns)
    _demand_one_layout(runs, divergence, judged=sum(answer.judged for answer in answers))
    bases = _count(BASES, (answer.bases for answer in answers))
    return Comparison(
        schema_version=SCHEMA_VERSION,
        tool=VERSION,
        policy=plan.policy,
        answer=(answer := _answer(divergence, answers, plan)),
        exit_code=_EXIT_CODES[answer],
        divergence=divergence,
        first_difference=_with_source(earliest_difference(answers), runs),
        externals=[external for answer in answers for external in answer.externals],
        untold=[external for answer in answers for external in answer.untold],
        findings=_findings(results, runs),
        findings_total=sum(result.findings_total for result in results),
        ranks=_rank_answers(answers, runs, patterns),
        steps=plan.steps,
        buckets=buckets,
        statuses=_count(STATUSES, (answer.statuses for answer in answers)),
        rows=sum(answer.rows for answer in answers),
        bases=bases,
        notes=[
            *plan.notes,
            *describe_narrowing((result.narrowing for result in results), agrees=answer == "agrees"),
            *_notes(runs, bases, unseen=sum(answer.unseen_updates for answer in answers)),
            *_alignment_notes(plan, results),
            *_random_notes(answers, divergence),
            *_layout_notes(runs, _count(STATUSES, (answer.statuses for answer in answers))),
        ],
        baseline=_side(runs[0], sum(result.calls[0] for result in results)),
        candidate=_side(runs[1], sum(result.calls[1] for result in results)),
        output=None if output is None else str(output),
        elapsed_s=round(time.monotonic() - started, 3),
        proving=_sum_proving(results),
        regions=sorted((region for answer in answers for region in answer.regions), key=lambda one: not one.begins)[
            :MAX_FINDINGS
        ],
        regions_total=sum(len(answer.regions) for answer in answers),
        endings=plan.endings,
        differing=differences(*(_about(run) for run in runs)),
    )


def _layout_notes(runs: tuple[Run, Run], statuses: Mapping[str, int]) -> list[str]:
    ours, theirs = (run.manifest.world_size for run in runs)
    if ours == theirs:
        return []
    return [
        f"the world size is {ours} in the baseline and {theirs} in the candidate: {statuses['unmeasured']:,} pairs of calls hold "
        "other parts of batches or weights and were not compared, nor were regions of such calls; what is whole in both was: "
        "parameters and, where an optimizer was recorded, their gradients and its state"
    ]


def _random_notes(answers: Sequence[StepAnswer], divergence: Divergence | None) -> list[str]:
    """Return which call drew other random numbers, if another call is named."""
    found = [answer.random for answer in answers if answer.random is not None]
    first = min(found, key=lambda one: one.place, default=None)
    if first is None or divergence is None or divergence.random:
        return []
    at = first.divergence
    return [
        f"{at.call} drew other random numbers in step {at.step}, rank {at.rank}: what follows differs for that too, and was "
        "judged by replays alone"
    ]


def _demand_one_layout(runs: tuple[Run, Run], divergence: Divergence | None, *, judged: int) -> None:
    """Raise OtherLayout if the runs had other numbers of processes, and no call is known to be wrong, or none was compared.

    A gradient that the optimizer reads is whole in every layout: if it differs, it is named.
    """
    ours, theirs = (run.manifest.world_size for run in runs)
    if ours == theirs or (divergence is None and judged):
        return
    if divergence is not None and (
        divergence.status == "introduced"
        or divergence.region is not None
        or (divergence.entered is not None and divergence.entered.kind == "gradient")
    ):
        return
    call = "" if divergence is None else divergence.call or divergence.candidate_call
    what = "nothing that both hold as a whole was compared."
    if divergence is not None:
        what = f"step {divergence.step}, {call} is the first call where what both hold differs; no call is known to be wrong."
    raise OtherLayout(
        f"the world size is {ours} in the baseline and {theirs} in the candidate: their processes hold other parts of "
        f"batches or weights, and parts are not compared with whole tensors. {what[0].upper()}{what[1:]}\n"
        "  Run both in the same layout. Where only the weights are split, recording with --level module compares the "
        "modules whose tensors have equal shapes."
    )


def _about(run: Run) -> dict[str, Any]:
    """Return what is known of the program."""
    versions = {"torch": run.manifest.torch, "python": run.manifest.python}
    return {**{name: version for name, version in versions.items() if version}, **run.manifest.provenance}


def _sum_proving(results: Sequence[RankResult]) -> Proving:
    total = Proving()
    for result in results:
        total.add(result.proving)
    return total


def _answer(divergence: Divergence | None, answers: Sequence[StepAnswer], plan: Plan | None = None) -> Answer:
    """Return the answer. If no result has a verdict, it is unknown; `plan` knows whether one run ends before the other."""
    if divergence is not None:
        return "diverged"
    if not any(step.judged for step in answers):
        return "unmeasured"
    if any(step.untold for step in answers):
        return "unclear"
    return "unfinished" if plan is not None and plan.endings else "agrees"


def _with_source(found: Candidate | None, runs: tuple[Run, Run]) -> Divergence | None:
    """Return the divergence with its source line, from the candidate or else the baseline."""
    if found is None:
        return None
    divergence, source = found.divergence, None
    for run, number in reversed(list(zip(runs, found.stacks, strict=True))):
        with suppress(RunDamaged):  # the answer has no source line then
            stack = None if number is None else run.segment(divergence.step, divergence.rank).stack(number)
            if stack is not None and stack.frames:
                source = stack.frames[0]
                break
    if source is None and divergence.finding is not None:  # a call without a partner is found by its name
        names = (divergence.call, divergence.candidate_call)
        source = _source(runs, names, divergence.step, divergence.rank)
    return msgspec.structs.replace(divergence, source=source)


def _source(runs: tuple[Run, Run], names: Sequence[str], step: int, rank: int) -> Frame | None:
    """Return the innermost source line of the call, from the candidate or else the baseline."""
    for run, name in reversed(list(zip(runs, names, strict=True))):
        # A backward call runs in the autograd engine: use the line of its forward call.
        for wanted in (name, forward_name(name)):
            if not wanted:
                continue
            try:
                stack = run.stack(run.call(wanted, step=step, rank=rank))
            except (NotFound, RunDamaged):
                continue  # a call of the other run, or its stacks are lost
            if stack is not None and stack.frames:
                return stack.frames[0]
    return None


def _findings(results: Sequence[RankResult], runs: tuple[Run, Run]) -> list[Finding]:
    findings = [finding for result in results for finding in result.findings][:MAX_FINDINGS]
    for number, finding in enumerate(findings[:MAX_SOURCES]):
        only_candidate = finding.kind == "only_candidate"
        names = ("", finding.call) if only_candidate else (finding.call, "")
        source = _source(runs, names, finding.step, finding.rank)
        findings[number] = msgspec.structs.replace(finding, source=source)
    return findings


def _patterns(results: Sequence[RankResult]) -> Mapping[_TensorPlace, Pattern]:
    """Return the patterns that were found, by step, rank, line of the call, and slot."""
    return {
        (each.step, each.rank, each.index, tensor.slot): tensor.pattern
        for result in results
        for each in result.evidence
        for tensor in each.tensors
        if tensor.pattern is not None
    }


def _with_pattern(divergence: Divergence | None, patterns: Mapping[_TensorPlace, Pattern]) -> Divergence | None:
    if divergence is None or divergence.row is None:
        return divergence
    place = (divergence.step, divergence.rank, divergence.index, divergence.row.slot)
    return msgspec.structs.replace(divergence, pattern=patterns.get(place))


def _rank_answers(
    answers: Sequence[StepAnswer], runs: tuple[Run, Run], patterns: Mapping[_TensorPlace, Pattern]
) -> list[RankAnswer]:
    """Return the answer of each rank, in the order of `answers`."""
    by_rank: dict[int, list[StepAnswer]] = {}
    for answer in answers:
        by_rank.setdefault(answer.rank, []).append(answer)
    return [
        RankAnswer(
            rank=rank,
            answer=_answer(divergence := _with_pattern(_with_source(first_divergence(own), runs), patterns), own),
            divergence=divergence,
            statuses=_count(STATUSES, (answer.statuses for answer in own)),
        )
        for rank, own in by_rank.items()
    ]


def _notes(runs: tuple[Run, Run], bases: dict[str, int], *, unseen: int) -> list[str]:
    notes = []
    if unseen:
        notes.append(
            "the optimizer was not recorded: parameters are judged by how they changed from step to step; a change of "
            "gradients after backward that the optimizer cancels (Adam does so with a scale) is not seen"
        )
    if bases["statistics"] and any(run.manifest.settings.get("mode") == "sketch" for run in runs):
        notes.append(
            f"{bases['statistics']:,} pairs of tensors were compared by statistics, digest and sketch, without values: how large "
            "an error is, is an estimate"
        )
    elif bases["statistics"]:
        notes.append(
            f"weaker: {bases['statistics']:,} pairs of tensors were compared by statistics and digest, without values; "
            "an error that keeps maximum, minimum, mean and norm is not seen"
        )
    if not bases["values"] and not bases["digest"] and not bases["statistics"]:
        notes.append("structure only: not one pair of tensors could be measured")
    for name, run in zip(("baseline", "candidate"), runs, strict=True):
        if run.manifest.lacks:
            notes.append(f"the {name}: {run.manifest.lacks}")
        if ended := describe_end(run):
            notes.append(f"the {name} did not finish: {ended}")
    return notes


def _alignment_notes(plan: Plan, results: Sequence[RankResult]) -> list[str]:
    """Return which of the user's hints were of no use, and whether calls were aligned coarsely."""
    notes = []
    for what, unused in (
        ("this line of the map pairs no calls", [result.unused_map or () for result in results]),
        ("this rule of the policy applies to no tensor", [result.unused_rules for result in results]),
    ):
        lines = [line for line in unused[0] if all(line in other for other in unused[1:])]
        notes += [f"{what}: {line}" for line in lines[:MAX_SOURCES]]
        if len(lines) > MAX_SOURCES:
            notes.append(f"{what}: {len(lines) - MAX_SOURCES:,} more like this")
    prefix = plan.tasks[0].strip_prefix
    if prefix and not any(result.stripped for result in results):
        notes.append(f"no module path begins with the prefix to strip, {prefix!r}")
    if any(result.coarse for result in results):
        notes.append("the runs differ in so many calls that their order was aligned coarsely: some pairs may be missed")
    return notes


def _side(run: Run, calls: int) -> RunSide:
    coverages = list(run.coverage.values())
    spots: dict[str, int] = {}
    for coverage in coverages:
        for kind, count in coverage.blind_spots.items():
            spots[kind] = spots.get(kind, 0) + count
    return RunSide(
        path=str(run.path),
        calls=calls,
        closed=run.closed,
        devices=sorted({part.device for part in run.parts.values() if part.device}),
        torch=run.manifest.torch,
        mode=str(run.manifest.settings.get("mode", "")),
        seen=sum(coverage.seen for coverage in coverages),
        recorded=sum(coverage.recorded for coverage in coverages),
        filtered=sum(coverage.filtered for coverage in coverages),
        failed=sum(coverage.failed for coverage in coverages),
        blind_spots=spots,
    )


def _sum_buckets(plan: Plan, results: Sequence[RankResult]) -> Buckets:
    total = Buckets(skipped=dict(plan.skipped))
    for result in results:
        total.add(result.buckets)
    return total


def _nothing_paired(runs: tuple[Run, Run], plan: Plan, buckets: Buckets) -> NothingPaired:
    damaged = sum(buckets.skipped.get(reason.value, 0) for reason in Skipped if reason.is_damage)
    total = buckets.only_baseline + buckets.only_candidate + buckets.in_regions + damaged
    message = f"0 of {total:,} calls have a partner."
    if total > damaged or not damaged:
        task = plan.tasks[0]
        names = [run.names(task.steps[0][0], task.rank, on_damage="skip") for run in runs]
        message += f" {nothing_paired_hint(*names)}"
    if damaged:
        verify = "\n".join(f"    tensorprobe inspect {shlex.quote(str(run.path))} --verify" for run in runs)
        message += (
            f"\n  {damaged:,} were skipped: their lines or those of their partners are damaged. See where:\n{verify}"
        )
    return NothingPaired(message)


def _count(names: Sequence[str], parts: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    total = dict.fromkeys(names, 0)
    for part in parts:
        for name, count in part.items():
            total[name] += count
    return total

"""Compares one rank: all its steps, in order. This is the unit of work.

Takes a `RankTask` and returns a `RankResult`, both plain data; on request, rows go to a file or memory. It depends
only on the two runs: the same task gives the same result in a thread, a process or on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy

from tensorprobe.engine.evidence import evidence_of
from tensorprobe.engine.narrowing import Narrowing
from tensorprobe.engine.proof import Prover
from tensorprobe.engine.settings import Prove
from tensorprobe.engine.tracing import Finders, finders_of, measure_updates
from tensorprobe.files import demand_uncut
from tensorprobe.judge import Policy
from tensorprobe.judge.divergence import StepAnswer, conclude_step
from tensorprobe.judge.noise_model import errors_of
from tensorprobe.judge.walk import Known, RankJudge
from tensorprobe.model.comparison import Buckets, Finding, Proving
from tensorprobe.model.diff import CallEvidence
from tensorprobe.model.measured import Measured
from tensorprobe.model.reason import Skipped
from tensorprobe.ops.names import without_prefix
from tensorprobe.pairing.align import Options
from tensorprobe.pairing.mapping import NameMap, parse_mapping
from tensorprobe.pairing.measure import MAX_FINDINGS, SegmentPair, measure_segment
from tensorprobe.record import Run
from tensorprobe.record.phases import left_out, of_phases
from tensorprobe.record.reader import open_run
from tensorprobe.report.table import TableWriter

if TYPE_CHECKING:
    import pyarrow as pa

Progress = Callable[[int], None]
Array = numpy.ndarray[Any, Any]


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of both runs, and how to compare it."""

    baseline: str
    candidate: str
    baseline_data: str | None = None
    candidate_data: str | None = None
    """The folder of the values of a run, if it is not the one of its layout."""
    rank: int
    candidate_rank: int
    steps: list[tuple[int, int]]
    whole: tuple[int | None, int | None] = (None, None)
    """The last whole step of a run that was ended from outside: it has only a part of the next one. None for the others."""
    policy: Policy
    map_text: str | None = None
    noise: list[str] = []
    """Further right runs of the baseline."""
    strip_prefix: str | None = None
    fuzzy: bool = False
    phases: tuple[str, ...] | None = None
    """The phases to compare; None for all."""
    threads: int = 1
    prove: Prove = "off"
    evidence: int = 0
    """How many calls evidence is kept of."""
    rows_file: str | None = None
    """The Parquet file for the rows."""


class RankResult(msgspec.Struct, kw_only=True):
    """The result of a task."""

    rank: int
    answers: list[StepAnswer]
    buckets: Buckets
    findings: list[Finding]
    findings_total: int
    calls: tuple[int, int] = (0, 0)
    """The number of calls read from each run."""
    unused_map: list[str] | None = None
    """Names in the map that no step has."""
    unused_rules: list[str] = []
    """Rules of the policy that decided on no row."""
    stripped: bool = False
    """Whether a module path begins with the prefix to strip."""
    coarse: bool = False
    """Whether a step was aligned approximately, so that pairs may be missing."""
    proving: Proving = msgspec.field(default_factory=Proving)
    evidence: list[CallEvidence] = []
    narrowing: Narrowing = msgspec.field(default_factory=Narrowing)


def compare_rank(
    task: RankTask,
    runs: tuple[Run, Run],
    *,
    progress: Progress | None = None,
    write: Callable[[pa.RecordBatch], None] | None = None,
) -> RankResult:
    """Measure and judge every step of one rank of two open runs. Rows go to the task's file, to `write`, or nowhere."""
    runs = (of_phases(runs[0], task.phases), of_phases(runs[1], task.phases))
    result = RankResult(rank=task.rank, answers=[], buckets=Buckets(), findings=[], findings_total=0)
    if task.rows_file is None:
        _compare_steps(task, runs, result, progress, write)
    else:
        with TableWriter(Path(task.rows_file), "parquet") as writer:
            _compare_steps(task, runs, result, progress, writer.write)
    return result


@lru_cache(maxsize=1)
def _mapping_of(text: str) -> NameMap:
    """Parse the map once for all ranks that this process compares."""
    return parse_mapping(text, source="the map")


def _compare_steps(
    task: RankTask,
    runs: tuple[Run, Run],
    result: RankResult,
    progress: Progress | None,
    write: Callable[[pa.RecordBatch], None] | None,
) -> None:
    judge = RankJudge(task.policy)
    prover = Prover(runs, task.policy, task.prove, task.threads)
    result.proving = prover.told
    now: Finders | None = None
    mapping = None if task.map_text is None else _mapping_of(task.map_text)
    options = Options(mapping=mapping, strip_prefix=task.strip_prefix, fuzzy=task.fuzzy)
    right = [open_run(path) for path in task.noise]
    other_layout = runs[0].manifest.world_size != runs[1].manifest.world_size
    for step, candidate_step in task.steps:
        cut = tuple(whole is not None and step > whole for whole in task.whole)
        place = SegmentPair(step, task.rank, candidate_step, task.candidate_rank, cut, other_layout)
        measured = measure_segment(runs, place, options=options, threads=task.threads, progress=progress)
        if right:
            measured.noise = _measure_noise(runs[0], right, measured, task.threads)
        before, now = now, finders_of(runs, place)
        demand_uncut()
        opinion = judge.judge(measured)
        known = Known(prover.prove(measured, opinion, now), measure_updates(measured, opinion, before, now))
        if any(known):
            opinion = judge.judge_again(measured, known)
            prover.told.withdrawn += len(opinion.withdrawn)
        opinion.unproved = prover.unproved
        answer = conclude_step(measured, opinion)
        result.answers.append(answer)
        if room := task.evidence - len(result.evidence):
            result.evidence += evidence_of(runs, now, measured, opinion, answer, most=room)
        others = (left_out(runs[0], step, task.rank), left_out(runs[1], candidate_step, task.candidate_rank))
        if any(others):
            measured.buckets.add(Buckets(skipped={Skipped.OTHER_PHASE.value: sum(others)}))
        result.buckets.add(measured.buckets)
        result.narrowing.add(measured, opinion)
        unused = set(measured.unused_map)
        held = measured.unused_map if result.unused_map is None else result.unused_map
        result.unused_map = [name for name in held if name in unused]
        result.coarse |= measured.coarse
        paths = {*measured.calls.module, *measured.calls.candidate_module} if task.strip_prefix else ()
        result.stripped |= any(without_prefix(path, task.strip_prefix) != path for path in paths)
        ours, theirs = result.calls
        result.calls = (ours + measured.read[0] + others[0], theirs + measured.read[1] + others[1])
        result.findings_total += len(answer.findings) + measured.findings_left_out
        result.findings += answer.findings[: max(0, MAX_FINDINGS - len(result.findings))]
        if write is not None:
            from tensorprobe.engine.columns import batches_of  # needs pyarrow: half of the start-up of a comparison

            for batch in batches_of(measured, opinion):
                write(batch)
    result.unused_rules = judge.unused_rules


def _measure_noise(baseline: Run, right: Sequence[Run], measured: Measured, threads: int) -> tuple[Array, Array]:
    """Return for each row the greatest RMS and maximum difference between the baseline and other right runs of it."""
    step, rank = measured.step, measured.rank
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for run in right:
        if (step, rank) not in run.segments():
            continue
        other = measure_segment((baseline, run), SegmentPair(step, rank, step, rank), threads=threads)
        errors, calls = errors_of(other), other.calls
        for row, (call, slot) in enumerate(zip(other.rows.call.tolist(), other.rows.slot, strict=True)):
            if not errors.equal[row]:
                place = (calls.name[call], calls.repeat[call], slot)
                rms, peak = found.get(place, (0.0, 0.0))
                found[place] = max(rms, float(errors.rms_error[row])), max(peak, float(errors.peak_error[row]))
    calls, rows = measured.calls, measured.rows
    held = [
        found.get((calls.name[call], calls.repeat[call], slot), (0.0, 0.0))
        for call, slot in zip(rows.call.tolist(), rows.slot, strict=True)
    ]
    both = numpy.array(held, dtype=float).reshape(-1, 2)
    return both[:, 0], both[:, 1]

"""`tensorprobe.compare`: compares two runs.

Returns a `Result` and, with `out`, writes files to that folder. Raises CannotCompare if the
runs have nothing in common, but never because they differ. The result does not depend on where the tasks run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.engine.evidence import choose_evidence
from tensorprobe.engine.gather import gather
from tensorprobe.engine.output import REPLAY_FILES, Output, write_result, write_text
from tensorprobe.engine.places import Place, Side, open_sides, runs_of
from tensorprobe.engine.plan import Plan, plan_tasks
from tensorprobe.engine.proof import replay_divergence, replay_region
from tensorprobe.engine.rank_task import Progress, RankResult
from tensorprobe.engine.result import Result, Rows
from tensorprobe.engine.settings import CompareSettings, Engine, Prove, TableForm
from tensorprobe.engine.tasks import run_tasks
from tensorprobe.engine.tracing import finders_of
from tensorprobe.errors import SettingsError
from tensorprobe.judge import Policy
from tensorprobe.judge.policy import POLICIES
from tensorprobe.model.comparison import Comparison, Divergence
from tensorprobe.model.diff import CallEvidence
from tensorprobe.pairing.measure import SegmentPair
from tensorprobe.settings import Names, Numbers, public
from tensorprobe.text import counted

if TYPE_CHECKING:
    import pyarrow as pa


def assert_runs_agree(baseline: Place, candidate: Place, **settings: Any) -> None:
    """Raise AssertionError with the answer unless two runs agree. `settings` are those of `compare`."""
    result = compare(baseline, candidate, **settings)
    if not result:
        raise AssertionError(f"the runs do not agree\n{result}")


@public
def compare(
    baseline: Place,
    candidate: Place,
    *,
    out: str | os.PathLike[str] | None = None,
    policy: str | Policy = "noise-aware",
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    phases: Names | None = None,
    map: str | os.PathLike[str] | None = None,
    noise: Sequence[str] = (),
    strip_prefix: str | None = None,
    fuzzy: bool = False,
    strict: bool = False,
    prove: Prove = "auto",
    threads: int | None = None,
    jobs: int = 1,
    engine: Engine = "local",
    address: str | None = None,
    table: TableForm = "parquet",
    workbook: bool = False,
    keep_rows: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Compare two runs call by call and find the first call where they part ways.

        result = tensorprobe.compare("runs/cuda", "runs/npu")
        print(result)            # what the command prints
        result.divergence        # the first diverging call, or None
        result.rows.table()      # every pair of tensors, as an Arrow table

    Args:
        baseline, candidate: the run that is trusted and the run under test: a folder, a URL or a Run.
        out: folder or URL for the result table, `summary.json`, `advisor.txt` and, if a call is wrong, `replay.py`, which
            runs it alone. Without it the rows stay in memory.
        policy: the name of a policy, e.g. `bitwise`, or the path of a TOML file with your own rules.
        steps, ranks: compare only these, e.g. `[0, 2]` or `'0,2-4'`. Rank i is compared with rank i.
        phases: compare only calls of these phases: `train`, `eval`, `generate`, `optimizer`.
        map: a file of name pairs: calls or modules of the baseline and their names in the candidate.
        noise: further right runs of the baseline. What they differ by from it is allowed, call by call.
        strip_prefix: strip this prefix from module paths, e.g. `module.`
        fuzzy: pair calls of the same op in order, even if their numbers differ.
        strict: structure that differs is a divergence (exit code 1), also where the results are the same.
        prove: `auto` replays calls that differ in float64 on both sides, within a budget; `all` has none; `off` infers only.
        threads: threads that measure tensors of one rank. By default all processors, divided among the jobs.
        jobs: number of processes on this machine. Each compares whole ranks.
        engine, address: `ray` compares the ranks on the Ray cluster at that address.
        table, workbook: form of the result table in `out` (`parquet` or `csv`), and whether to write `result.xlsx` too.
        keep_rows: keep the rows in memory when there is no `out`.
        progress: is called with the number of pairs of calls that were compared since the last time. If it has a method
            `expect`, that is called once before, with about how many there will be.

    Returns a Result: `result.exit_code` is 0 when the runs agree, 1 when they diverge, and 2 when no result was measured or
    a run ends before the other and what both have agrees. Raises CannotCompare when the
    runs have nothing in common, and SettingsError for a setting that is wrong. A difference is never an exception.
    """
    settings = CompareSettings.among(locals())
    started = time.monotonic()
    if workbook and out is None:
        raise SettingsError("workbook writes a file: pass out=FOLDER (-o FOLDER).")
    with open_sides(baseline, candidate, settings) as sides:
        plan = plan_tasks(sides, settings)
        if (expect := getattr(progress, "expect", None)) is not None:
            expect(plan.expected_calls(sides[0].run))
        if out is None:
            kept: list[pa.RecordBatch] | None = [] if keep_rows else None
            results = run_tasks(plan.tasks, sides, settings, keep=kept, progress=progress)
            summary = add_replay(
                conclude(sides, plan, results, output=None, started=started, strict=strict), sides, plan, None
            )
            return Result(summary, Rows(kept, summary.rows), evidence=evidence_kept(summary, results))
        with Output(out) as output:
            tasks = plan.tasks_with_rows_in(output.stage)
            results = run_tasks(tasks, sides, settings, keep=None, progress=progress)
            summary = conclude(sides, plan, results, output=output.said, started=started, strict=strict)
            summary = add_replay(summary, sides, plan, output.stage)
            parts = [Path(task.rows_file) for task in tasks if task.rows_file is not None]
            evidence = evidence_kept(summary, results)
            return write_result(summary, output, parts, evidence=evidence, table=table, workbook=workbook)


def suggest_map(baseline: Place, candidate: Place, **settings: Any) -> str:
    """Return the text of a map for `--map`, from the first step that both runs have."""
    from tensorprobe.pairing.suggest import suggest_map as suggest

    chosen = CompareSettings(**settings)
    with open_sides(baseline, candidate, chosen) as sides:
        task = plan_tasks(sides, chosen).tasks[0]
        opened = {(side.address, side.data): side.opened for side in sides if side.opened is not None}
        with runs_of(task, opened) as runs:
            places = zip(runs, task.steps[0], (task.rank, task.candidate_rank), strict=True)
            calls = [run.calls(step, rank, on_damage="skip") for run, step, rank in places]
            return suggest(*([call.model for call in side] for side in calls))


def evidence_kept(summary: Comparison, results: Sequence[RankResult]) -> list[CallEvidence]:
    """Return what is kept of the calls where the runs part: of the first divergence, of those of the ranks, then of others."""
    found = [one for result in results for one in result.evidence]
    return choose_evidence(found, [summary.divergence, *(rank.divergence for rank in summary.ranks)])


def conclude(
    sides: tuple[Side, Side],
    plan: Plan,
    results: Sequence[RankResult],
    *,
    output: str | None,
    started: float,
    strict: bool = False,
) -> Comparison:
    """Return the whole answer, with the runs named as the user named them."""
    summary = gather((sides[0].run, sides[1].run), plan, results, output=None, started=started)
    if strict and summary.exit_code == 0 and summary.regions_total:
        said = f"strict: {counted(summary.buckets.in_regions, 'call')} differ in structure, which is exit code 1"
        summary = msgspec.structs.replace(summary, exit_code=1, notes=[*summary.notes, said])
    return msgspec.structs.replace(
        summary,
        output=output,
        baseline=msgspec.structs.replace(summary.baseline, path=sides[0].said),
        candidate=msgspec.structs.replace(summary.candidate, path=sides[1].said),
    )


def add_replay(summary: Comparison, sides: tuple[Side, Side], plan: Plan, folder: Path | None) -> Comparison:
    """Replay the diverging call alone and return the answer with what that says; its script goes to the folder.

    Where the replays of the comparison have decided already, only the script is missing. No verdict changes.
    """
    found, task = summary.divergence, plan.tasks[0]
    decided = task.policy == POLICIES["noise-aware"]
    if found is None or task.prove == "off":
        return summary
    own = next(task for task in plan.tasks if task.rank == found.rank)
    place = SegmentPair(found.step, found.rank, dict(own.steps)[found.step], own.candidate_rank)
    finders = finders_of((sides[0].run, sides[1].run), place)
    if found.region is not None and found.row is not None and found.row.basis == "values" and decided:
        found = msgspec.structs.replace(found, region_proof=replay_region(finders, found.region))
        summary = msgspec.structs.replace(summary, divergence=found)
    if decided and folder is None:
        return summary
    if reason := _not_one_call(found):
        notes = [] if folder is None else [f"no {REPLAY_FILES[0]}: {reason}"]
        return msgspec.structs.replace(summary, notes=[*summary.notes, *notes])
    proof, replayed = replay_divergence(finders, found)
    if not decided:
        unproved = "" if proof is not None else replayed.reason
        found = msgspec.structs.replace(found, proof=proof, unproved=unproved)
    changes: dict[str, Any] = {"divergence": found}
    if folder is not None and replayed.script:
        write_text(folder / REPLAY_FILES[0], replayed.script)
        (folder / REPLAY_FILES[1]).write_bytes(replayed.tensors)
        changes["replay"] = REPLAY_FILES[0]
    elif folder is not None:
        changes["notes"] = [*summary.notes, f"no {REPLAY_FILES[0]}: {replayed.reason}"]
    return msgspec.structs.replace(summary, **changes)


def _not_one_call(found: Divergence) -> str:
    """Return why no script can show a divergence by running one call; empty where one can."""
    if found.status == "entered":
        return "no recorded call is wrong; what differs comes from outside of them"
    if found.status == "structural":
        return "the runs make different calls, and none of them is known to be wrong by itself"
    if found.status != "introduced" or found.row is None:
        return "no call is known to be wrong by itself"
    if not found.level.is_op:
        return "a module has no function to run alone; record its calls with --level mix"
    return "" if found.row.basis == "values" else "only statistics were recorded"

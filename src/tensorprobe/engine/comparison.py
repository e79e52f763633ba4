"""`tensorprobe.compare`: two runs in, one answer out.

In: two runs and settings. Out: a `Result`; with `out`, also files in that folder. Fails with CannotCompare when the
runs have nothing in common, never with an exception because they differ. Where the tasks run changes no byte of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tensorprobe.engine.gather import gather
from tensorprobe.engine.output import Output, write_result
from tensorprobe.engine.places import Place, Side, open_sides
from tensorprobe.engine.plan import Plan, plan_tasks
from tensorprobe.engine.rank_task import Progress, RankResult
from tensorprobe.engine.result import Result, Rows
from tensorprobe.engine.settings import CompareSettings, Engine, Numbers, TableForm
from tensorprobe.engine.tasks import run_tasks
from tensorprobe.errors import SettingsError
from tensorprobe.judge import Policy
from tensorprobe.model.comparison import Comparison

if TYPE_CHECKING:
    import pyarrow as pa


def compare(
    baseline: Place,
    candidate: Place,
    *,
    out: str | os.PathLike[str] | None = None,
    policy: str | Policy = "noise-aware",
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    map: str | os.PathLike[str] | None = None,
    strip_prefix: str | None = None,
    fuzzy: bool = False,
    threads: int | None = None,
    jobs: int = 1,
    engine: Engine = "local",
    address: str | None = None,
    table: TableForm = "parquet",
    workbook: bool = False,
    keep_rows: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Compare two runs call by call and find the first call where they part.

    Runs and `out` are folders or URLs. `out` is for the result table, `summary.json` and `advisor.txt`, with `workbook`
    also `result.xlsx`; without it the rows are kept in memory (`keep_rows`). `policy` is a name or the path of a TOML file.
    `map`, `strip_prefix` and `fuzzy` help where names differ. `jobs` processes each take whole ranks, `threads` measure
    the tensors of one (by default the processors are shared out). `engine="ray"` sends the ranks to the Ray cluster at
    `address`. `progress` is told how many pairs of calls were done.
    """
    started = time.monotonic()
    settings = CompareSettings(
        policy=policy,
        steps=steps,
        ranks=ranks,
        map=map,
        strip_prefix=strip_prefix,
        fuzzy=fuzzy,
        threads=threads,
        jobs=jobs,
        engine=engine,
        address=address,
        table=table,
        workbook=workbook,
    )
    if workbook and out is None:
        raise SettingsError("a workbook is a file: say where with out (-o FOLDER).")
    with open_sides(baseline, candidate, settings) as sides:
        plan = plan_tasks(sides, settings)
        if out is None:
            kept: list[pa.RecordBatch] | None = [] if keep_rows else None
            results = run_tasks(plan.tasks, settings, keep=kept, progress=progress)
            summary = conclude(sides, plan, results, output=None, started=started)
            return Result(summary, Rows(kept, summary.rows))
        with Output(out) as output:
            tasks = plan.tasks_with_rows_in(output.stage)
            results = run_tasks(tasks, settings, keep=None, progress=progress)
            summary = conclude(sides, plan, results, output=output.said, started=started)
            parts = [Path(task.rows_file) for task in tasks if task.rows_file is not None]
            return write_result(summary, output, parts, table=table, workbook=workbook)


def conclude(
    sides: tuple[Side, Side], plan: Plan, results: Sequence[RankResult], *, output: str | None, started: float
) -> Comparison:
    """The whole answer; the places in it are named as the user named them."""
    summary = gather((sides[0].run, sides[1].run), plan, results, output=None, started=started)
    return msgspec.structs.replace(
        summary,
        output=output,
        baseline=msgspec.structs.replace(summary.baseline, path=sides[0].said),
        candidate=msgspec.structs.replace(summary.candidate, path=sides[1].said),
    )

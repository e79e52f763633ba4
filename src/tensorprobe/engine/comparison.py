"""`tensorprobe.compare`: two runs in, one answer out.

In: two run folders and settings. Out: a `Result`; with `out`, also files in that folder. Fails with CannotCompare when the
runs have nothing in common, never with an exception because they differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensorprobe.compare.mapping import read_mapping
from tensorprobe.engine.gather import gather
from tensorprobe.engine.local import run_tasks
from tensorprobe.engine.output import write_output
from tensorprobe.engine.plan import plan_tasks
from tensorprobe.engine.rank_task import Progress
from tensorprobe.engine.result import Result, Rows
from tensorprobe.errors import SettingsError
from tensorprobe.judge import Policy, load_policy
from tensorprobe.record import Run, open_run
from tensorprobe.settings import parse_numbers

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = str | int | Iterable[int]


def compare(
    baseline: str | os.PathLike[str] | Run,
    candidate: str | os.PathLike[str] | Run,
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
    table: Literal["parquet", "csv"] = "parquet",
    keep_rows: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Compare two runs call by call and find the first call where they part.

    `out` is a folder for the result table, `summary.json` and `advisor.txt`; without it the rows are kept in memory
    (`keep_rows`). `policy` is a name or the path of a TOML file. `map`, `strip_prefix` and `fuzzy` help where names differ.
    `threads` measure tensors (all processors by default), `jobs` processes each take whole ranks. `progress` is told how many
    pairs of calls were done.
    """
    started = time.monotonic()
    runs = tuple(run if isinstance(run, Run) else open_run(run) for run in (baseline, candidate))
    plan = plan_tasks(
        (runs[0], runs[1]),
        steps=None if steps is None else parse_numbers(steps, "steps"),
        ranks=None if ranks is None else parse_numbers(ranks, "ranks"),
        policy=policy if isinstance(policy, Policy) else load_policy(policy),
        map_text=_map_text(map),
        strip_prefix=strip_prefix,
        fuzzy=fuzzy,
        threads=_positive(threads, "threads") or max(1, (os.cpu_count() or 1) // jobs),
    )
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plan.write_rows_to(folder)
    kept: list[pa.RecordBatch] | None = [] if keep_rows and folder is None else None
    results = run_tasks(plan.tasks, jobs=_positive(jobs, "jobs") or 1, folder=folder, keep=kept, progress=progress)
    summary = gather((runs[0], runs[1]), plan, results, output=folder, started=started)
    if folder is None:
        return Result(summary, Rows(kept, summary.rows))
    return Result(summary, Rows(write_output(summary, folder, plan.tasks, table), summary.rows))


def _map_text(path: str | os.PathLike[str] | None) -> str | None:
    """The text of the map, checked here so that a mistake in it is found before anything is read."""
    if path is None:
        return None
    read_mapping(Path(path))
    return Path(path).read_text(encoding="utf-8")


def _positive(number: Any, name: str) -> int | None:
    if number is not None and (not isinstance(number, int) or number < 1):
        raise SettingsError(f"{name} is {number!r}; it must be a whole number from 1 on.")
    return number

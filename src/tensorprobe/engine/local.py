"""Runs the tasks of a comparison: here, in processes of this machine, or on a cluster. The results are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tensorprobe.engine.parcel import run_task, unpack_rows
from tensorprobe.engine.rank_task import Progress, RankResult, RankTask
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.report.table import TableWriter

if TYPE_CHECKING:
    import pyarrow as pa


def run_tasks(
    tasks: Sequence[RankTask],
    settings: CompareSettings,
    *,
    keep: list[pa.RecordBatch] | None,
    progress: Progress | None,
) -> list[RankResult]:
    """The results, in the order of the tasks. Rows go into the file of each task; those without one, into `keep`."""
    threads = settings.threads_for(len(tasks))
    tasks = [msgspec.structs.replace(task, threads=threads) for task in tasks]
    if settings.engine == "local" and min(settings.jobs, len(tasks)) < 2:
        write = None if keep is None else keep.append
        return [run_task(task, progress=progress, write=write) for task in tasks]
    collected = _Collected(tasks, keep, write_files=settings.engine == "ray")
    if not tasks:
        return []
    if settings.engine == "ray":
        from tensorprobe.work.cluster import run_on_cluster

        there = [msgspec.structs.replace(task, rows_file=None) for task in tasks]
        wanted = keep is not None or any(task.rows_file for task in tasks)
        run_on_cluster(there, settings, rows=wanted, take=collected.take, progress=progress)
    else:
        from tensorprobe.work.pool import run_in_processes

        run_in_processes(tasks, settings.jobs, rows=keep is not None, take=collected.take, progress=progress)
    return collected.in_order()


class _Collected:
    """Outcomes in the order in which they come, given back in the order of the tasks."""

    def __init__(self, tasks: Sequence[RankTask], keep: list[pa.RecordBatch] | None, *, write_files: bool) -> None:
        self._tasks, self._keep, self._write_files = tasks, keep, write_files
        self._results: dict[int, RankResult] = {}
        self._rows: dict[int, bytes] = {}

    def take(self, number: int, result: RankResult, rows: bytes) -> None:
        self._results[number] = result
        file = self._tasks[number].rows_file
        if file is None:
            self._rows[number] = rows
        elif self._write_files:  # processes of this machine write theirs themselves
            with TableWriter(file, "parquet") as writer:
                for batch in unpack_rows(rows):
                    writer.write(batch)

    def in_order(self) -> list[RankResult]:
        numbers = range(len(self._tasks))
        if self._keep is not None:
            for number in numbers:
                self._keep += unpack_rows(self._rows.pop(number, b""))
        return [self._results[number] for number in numbers]

"""Runs the tasks of a comparison in this process, in local processes, or on a cluster, with the same results.

A task and its result travel as MessagePack, its rows as an Arrow stream inside the result.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.engine.places import OpenRuns, Side, runs_of
from tensorprobe.engine.rank_task import Progress, RankResult, RankTask, compare_rank
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import CannotCompare, TensorprobeError
from tensorprobe.report.table import TableWriter
from tensorprobe.work.pool import Answer, Death, Job, Reply, StartFailed, pack, run_in_processes

if TYPE_CHECKING:
    import pyarrow as pa

_TARGET = "tensorprobe.engine.tasks:answer_tasks"
_INSTEAD = "Compare on this machine instead: --jobs N; or with a Ray of its own: --address local."
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def run_tasks(
    tasks: Sequence[RankTask],
    sides: tuple[Side, Side],
    settings: CompareSettings,
    *,
    keep: list[pa.RecordBatch] | None,
    progress: Progress | None,
) -> list[RankResult]:
    """Return the results in the order of the tasks. Rows go to the file of each task, or to `keep` if it has none."""
    threads = settings.threads_for(len(tasks))
    tasks = [msgspec.structs.replace(task, threads=threads) for task in tasks]
    on_cluster = settings.engine == "ray"
    if not on_cluster and min(settings.jobs, len(tasks)) < 2:
        opened = {(side.address, side.data): side.opened for side in sides if side.opened is not None}
        write = None if keep is None else keep.append
        return [_run_task(task, opened, progress=progress, write=write) for task in tasks]
    collected = _Collected(tasks, keep, write_files=on_cluster)
    if on_cluster:
        _run_on_cluster(tasks, settings, collected, keep is not None, progress)
        return collected.in_order()

    def died(death: Death) -> None:
        rank = tasks[death.number].rank
        if death.bug:
            raise RuntimeError(f"comparing rank {rank} failed in a process:\n{death.bug}")
        last = f": {death.last_line}" if death.last_line else ""
        raise CannotCompare(
            f"the process that compared rank {rank} {death.how}{last}. Nothing was written.\n"
            "  If memory was short, use fewer --jobs; --jobs 1 compares in this process."
        )

    parcels = [_pack(task, rows=keep is not None) for task in tasks]
    try:
        run_in_processes(
            Job(target=_TARGET), parcels, jobs=settings.jobs, take=collected.take, died=died, progress=progress
        )
    except StartFailed as failed:
        raise CannotCompare(
            f"a process could not start: it {failed}\n  Compare in this process with --jobs 1."
        ) from failed
    return collected.in_order()


def _run_on_cluster(
    tasks: Sequence[RankTask], settings: CompareSettings, collected: _Collected, keep: bool, progress: Progress | None
) -> None:
    """Run the tasks on the cluster. Their rows come back, because only this process writes to the output folder."""
    from tensorprobe.work.cluster import ClusterFailed, run_on_cluster

    def died(death: Death) -> None:
        raise CannotCompare(
            f"the worker that compared rank {tasks[death.number].rank} {death.how}: {death.last_line}\n"
            f"  Nothing was written. {_INSTEAD}"
        )

    rows = keep or any(task.rows_file for task in tasks)
    parcels = [_pack(msgspec.structs.replace(task, rows_file=None), rows=rows) for task in tasks]
    try:
        run_on_cluster(
            Job(target=_TARGET),
            parcels,
            address=settings.address,
            jobs=settings.jobs,
            threads=settings.threads or 1,
            take=collected.take,
            died=died,
            progress=progress,
        )
    except ClusterFailed as failed:
        raise CannotCompare(f"{failed}\n  {_INSTEAD}") from None


def _run_task(
    task: RankTask,
    opened: OpenRuns,
    *,
    progress: Progress | None = None,
    write: Callable[[pa.RecordBatch], None] | None = None,
) -> RankResult:
    """Run the task in this process."""
    try:
        with runs_of(task, opened) as runs:
            return compare_rank(task, runs, progress=progress, write=write)
    except OSError as error:
        refusal = as_refusal(error)
        if refusal is None:
            raise
        raise refusal from error


def as_refusal(error: OSError) -> CannotCompare | None:
    """Return a full disk and the like as a user's error; None for everything else."""
    if isinstance(error, TensorprobeError) or error.errno not in _REFUSALS:
        return None
    return CannotCompare(f"the result cannot be written: {error}.\n  Pass another output folder (-o).")


class _Collected:
    """Results in the order in which they finish, returned in the order of the tasks."""

    def __init__(self, tasks: Sequence[RankTask], keep: list[pa.RecordBatch] | None, *, write_files: bool) -> None:
        self._tasks, self._keep, self._write_files = tasks, keep, write_files
        self._results: dict[int, RankResult] = {}
        self._rows: dict[int, bytes] = {}

    def take(self, number: int, reply: bytes) -> None:
        outcome = msgspec.msgpack.decode(reply, type=_Outcome)
        self._results[number] = outcome.result
        file = self._tasks[number].rows_file
        if file is None:
            self._rows[number] = outcome.rows
        elif self._write_files:  # local processes write their own
            with TableWriter(file, "parquet") as writer:
                for batch in _unpack_rows(outcome.rows):
                    writer.write(batch)

    def in_order(self) -> list[RankResult]:
        numbers = range(len(self._tasks))
        if self._keep is not None:
            for number in numbers:
                self._keep += _unpack_rows(self._rows.pop(number, b""))
        return [self._results[number] for number in numbers]


class _Parcel(msgspec.Struct, frozen=True):
    task: RankTask
    places: dict[str, bytes]
    """The fields of the task that are paths, which need not be Unicode."""
    rows: bool
    """Whether the reply contains the rows."""


class _Outcome(msgspec.Struct, frozen=True):
    result: RankResult
    rows: bytes


_PLACES = ("baseline", "candidate", "baseline_data", "candidate_data", "rows_file")


def _pack(task: RankTask, *, rows: bool) -> bytes:
    places = {name: os.fsencode(place) for name in _PLACES if (place := getattr(task, name)) is not None}
    return pack(_Parcel(task, places, rows))


@contextmanager
def answer_tasks(start: bytes, progress: Progress) -> Iterator[Answer]:
    """Answer parcels, each of which holds one task; a target of `work.pool`."""
    opened: OpenRuns = {}

    def answer(parcel: bytes) -> Reply:
        wanted = msgspec.msgpack.decode(parcel, type=_Parcel)
        places: dict[str, Any] = {name: os.fsdecode(place) for name, place in wanted.places.items()}
        task = msgspec.structs.replace(wanted.task, **places)
        rows = _PackedRows() if wanted.rows else None
        result = _run_task(task, opened, progress=progress, write=None if rows is None else rows.write)
        return Reply(pack(_Outcome(result, b"" if rows is None else rows.close())))

    yield answer


class _PackedRows:
    """Return batches as one compressed Arrow stream. Rows repeat, so it is usually a tenth of their size."""

    def __init__(self) -> None:
        import pyarrow as pa

        self._sink = pa.BufferOutputStream()
        self._stream: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        if self._stream is None:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._stream = pa.ipc.new_stream(self._sink, batch.schema, options=options)
        self._stream.write_batch(batch)

    def close(self) -> bytes:
        if self._stream is None:
            return b""
        self._stream.close()
        packed: bytes = self._sink.getvalue().to_pybytes()
        return packed


def _unpack_rows(packed: bytes) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    if packed:
        with pa.ipc.open_stream(packed) as stream:
            yield from stream

"""Runs the tasks of a comparison on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.engine.rank_task import Progress, RankResult, RankTask, compare_rank

if TYPE_CHECKING:
    import pyarrow as pa


def run_tasks(
    tasks: Sequence[RankTask],
    *,
    jobs: int,
    folder: Path | None,
    keep: list[pa.RecordBatch] | None,
    progress: Progress | None,
) -> list[RankResult]:
    """The results, in the order of the tasks."""
    return [compare_rank(task, progress=progress, keep=keep) for task in tasks]

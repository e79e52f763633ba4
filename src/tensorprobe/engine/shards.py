"""A comparison in independent parts for batch systems: `compare_shard` for each, then `merge_shards`.

Shard i of n takes the tasks i, i + n, i + 2n, … and leaves in the output folder `shard-i-of-n.json` (results as JSON, non-finite
numbers as strings) and the rows of each rank beside it. Merging checks that all shards are there and answer the same
question, and then gathers as `compare` does: the files are the same, byte for byte. The parts are removed when it is done.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.engine.comparison import add_replay, conclude, evidence_kept
from tensorprobe.engine.output import Output, write_result
from tensorprobe.engine.places import Place, Side, open_sides
from tensorprobe.engine.plan import plan_tasks
from tensorprobe.engine.rank_task import Progress
from tensorprobe.engine.result import Result
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.engine.shard_files import (
    FORMAT,
    MOST_SHARDS,
    SHARD_FILE,
    Question,
    Shard,
    digest_of,
    pack_shard,
    plan_of,
    question_of,
    read_parts,
    read_shards,
    rows_name,
)
from tensorprobe.engine.tasks import run_tasks
from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.text import ranges
from tensorprobe.version import VERSION

_SHARD = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class ShardDone:
    """What one shard did, and which shards are still missing before the merge."""

    number: int
    of: int
    ranks: list[int]
    all_ranks: int
    pairs: int
    output: str
    missing: list[int]


def parse_shard(text: str) -> tuple[int, int]:
    """Return `2/8` as (2, 8)."""
    match = _SHARD.fullmatch(text.strip())
    if match is None or int(match[1]) > int(match[2]):
        raise SettingsError(f"shard is {text!r}; it must be i/n with i from 1 to n: the second of eight is 2/8.")
    if int(match[2]) > MOST_SHARDS:
        raise SettingsError(f"shard is {text!r}; expected at most {MOST_SHARDS:,} parts.")
    return int(match[1]), int(match[2])


def compare_shard(
    baseline: Place,
    candidate: Place,
    *,
    shard: str,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    **settings: Any,
) -> ShardDone:
    """Do one part of a comparison, with the settings of `compare`. `merge_shards(out)` returns the answer later."""
    started = time.monotonic()
    number, of = parse_shard(shard)
    checked = CompareSettings.of(**settings)
    with open_sides(baseline, candidate, checked) as sides, Output(out) as output:
        plan = plan_tasks(sides, checked)
        tasks = [
            msgspec.structs.replace(task, rows_file=str(output.stage / rows_name(number, of, task.rank)))
            for task in plan.tasks[number - 1 :: of]
        ]
        results = run_tasks(tasks, sides, checked, keep=None, progress=progress)
        name = f"shard-{number}-of-{of}.json"
        held = Shard(
            format=FORMAT,
            tool=VERSION,
            number=number,
            of=of,
            question=question_of(sides, plan, checked),
            results=results,
            rows={Path(task.rows_file).name: digest_of(Path(task.rows_file)) for task in tasks if task.rows_file},
            elapsed_s=round(time.monotonic() - started, 3),
        )
        (output.stage / name).write_bytes(pack_shard(held))
        # Remove the description first and write it last, so that it never stands beside rows of another comparison.
        output.remove(entry for entry in output.names() if entry == name)
        output.publish([*(Path(task.rows_file).name for task in tasks if task.rows_file), name])
        there = {
            int(match[1]) for entry in output.names() if (match := SHARD_FILE.fullmatch(entry)) and int(match[2]) == of
        }
        return ShardDone(
            number=number,
            of=of,
            ranks=[task.rank for task in tasks],
            all_ranks=len(plan.tasks),
            pairs=sum(result.buckets.paired for result in results),
            output=output.said,
            missing=[each for each in range(1, of + 1) if each not in there],
        )


def merge_shards(folder: str | os.PathLike[str]) -> Result:
    """Return the result of a comparison whose shards are all in the folder. Its files replace the parts."""
    started = time.monotonic()
    with Output(folder, create=False) as output:
        shards = read_shards(output)
        question, of = shards[0].question, shards[0].of
        plan = plan_of(question)
        results = {result.rank: result for shard in shards for result in shard.results}
        lacking = [task.rank for task in plan.tasks if task.rank not in results]
        if lacking:
            raise CannotCompare(f"no shard in '{output.said}' holds rank {ranges(lacking)}. Run all shards again.")
        names = {task.rank: rows_name(at % of + 1, of, task.rank) for at, task in enumerate(plan.tasks)}
        parts = read_parts(output, names, shards)
        needed = CompareSettings(steps=plan.steps, ranks=[task.rank for task in plan.tasks])
        with open_sides(question.baseline.address, question.candidate.address, needed) as found:
            sides = _demand_same_runs(found, question)
            begun = started - max(shard.elapsed_s for shard in shards)
            ordered = [results[task.rank] for task in plan.tasks]
            summary = conclude(sides, plan, ordered, output=output.said, started=begun)
            summary = add_replay(summary, sides, plan, output.stage)
            evidence = evidence_kept(summary, ordered)
            result = write_result(
                summary, output, parts, evidence=evidence, table=question.table, workbook=question.workbook
            )
        ours = re.compile(rf"shard-[0-9]+-of-{of}(-rank[0-9]+\.parquet|\.json)")
        output.remove([name for name in output.names() if ours.fullmatch(name)])
        return result


def _demand_same_runs(found: Sequence[Side], question: Question) -> tuple[Side, Side]:
    """Open the runs by the names in the shards. They must be those that the shards read."""
    sides = []
    for side, origin in zip(found, (question.baseline, question.candidate), strict=True):
        if side.run.manifest.created != origin.created:
            raise CannotCompare(
                f"'{origin.said}' was recorded at {side.run.manifest.created}, the shards have read one of {origin.created}.\n"
                "  Run all shards again."
            )
        sides.append(replace(side, said=origin.said))
    return sides[0], sides[1]

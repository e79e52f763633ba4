"""The output folder of a comparison: the table, `summary.json`, `advisor.txt`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tensorprobe.engine.rank_task import RankTask
from tensorprobe.model.comparison import Comparison
from tensorprobe.report.advisor import render_advice
from tensorprobe.report.compare_json import comparison_json
from tensorprobe.report.table import TableWriter, read_table


def write_output(
    summary: Comparison, folder: Path, tasks: Sequence[RankTask], table: Literal["parquet", "csv"]
) -> Path:
    """Put everything in its place and return the path of the table; the parts that the ranks wrote are used up."""
    path = folder / f"result.{table}"
    parts = [Path(task.rows_file) for task in tasks if task.rows_file is not None]
    line = None
    if len(parts) == 1 and table == "parquet":
        line = _line_of(summary, parts[0])
        parts[0].replace(path)
    else:
        with TableWriter(path, table) as writer:
            for part in parts:
                for batch in read_table(part):
                    writer.write(batch)
        for part in parts:
            part.unlink()
        line = _line_of(summary, path)
    write_text(folder / "summary.json", comparison_json(summary, indent=2) + "\n")
    write_text(folder / "advisor.txt", render_advice(summary, line=line))
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _line_of(summary: Comparison, path: Path) -> int | None:
    """The line of the first divergence in the table, counted as an editor shows it as CSV: the header is line 1."""
    import pyarrow.compute as compute

    row = summary.divergence.row if summary.divergence else None
    if row is None:
        return None
    line = 2
    for batch in read_table(path):
        mask = None
        for name in ("step", "rank", "index", "slot"):
            hit = compute.equal(batch[name], getattr(row, name))
            mask = hit if mask is None else compute.and_(mask, hit)
        at = compute.index(mask, True).as_py()
        if at >= 0:
            return int(line + at)
        line += batch.num_rows
    return None

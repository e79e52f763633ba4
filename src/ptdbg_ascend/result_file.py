"""The CSV of a result on disk: its name, and cells that a spreadsheet only shows.

The file appears under its name only when it is complete, and never in place of another.
"""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptdbg_ascend.table import FIGURES, Table
from tensorprobe.report.table import safe_text


def write_csv(table: Table, partial: Path) -> None:
    """The table into a file that is there already."""
    columns = [_safe_column(name, values) for name, values in table.columns.items()]
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(zip(*columns, strict=True))


def _safe_column(name: str, values: list[Any]) -> Iterable[Any]:
    """Numbers as they are; a text is looked at once, however often it occurs."""
    return values if name in FIGURES else map(functools.cache(safe_text), values)


def timestamp() -> str:
    """The time of day as it stands in the names of results."""
    return time.strftime("%Y%m%d%H%M%S")


@contextmanager
def result_files(folder: Path, suffix: str, stamp: str) -> Iterator[tuple[Path, Path, Path]]:
    """Names for a result that nobody has: of the CSV while it is written, of the CSV, of the advice that goes with it.

    The CSV gets its name at the end, unless an exception came first. A second result within one second has `_1` behind
    its time: the old tool wrote over the first.
    """
    number = 0
    while True:
        ending = f"{suffix}_{stamp}{f'_{number}' if number else ''}"
        final, advice = folder / f"compare_result{ending}.csv", folder / f"advisor{ending}.txt"
        partial = folder / f".{final.name}.partial"
        number += 1
        try:
            partial.touch(exist_ok=False)  # whoever makes it owns the name
        except FileExistsError:
            continue
        if not final.exists() and not advice.exists():
            break
        partial.unlink()
    try:
        yield partial, final, advice
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)

"""A table on disk: its name, and cells that a spreadsheet only shows.

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

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.compared.form import Table
from tensorprobe.report.xlsx import MOST_ROWS, RED, open_workbook, write_row
from tensorprobe.text import sheet_text


def write_csv(table: Table, partial: Path) -> None:
    """The table into a file that is there already."""
    columns = [_safe_column(table, name, values) for name, values in table.columns.items()]
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(zip(*columns, strict=True))


def _safe_column(table: Table, name: str, values: list[Any]) -> Iterable[Any]:
    """Numbers as they are; a text is looked at once, however often it occurs."""
    return values if name in table.form.figures else map(functools.cache(sheet_text), values)


def write_workbook(table: Table, partial: Path) -> None:
    """The same as XLSX: one sheet, rows that fail in red. SettingsError without xlsxwriter, or for more rows than a sheet holds."""
    if len(table) > MOST_ROWS:
        raise SettingsError(f"the table has {len(table):,} rows, a sheet holds {MOST_ROWS:,}: have it as csv.")
    with open_workbook(partial) as workbook:
        sheet = workbook.add_worksheet("comparison")
        heading, red = workbook.add_format({"bold": True}), workbook.add_format(RED)
        sheet.write_row(0, 0, list(table.columns), heading)
        sheet.freeze_panes(1, 0)
        results = table.columns[table.form.verdict]
        for row, values in enumerate(zip(*table.columns.values(), strict=True), start=1):
            write_row(sheet, row, values, red if results[row - 1] in table.form.bad else None)


def timestamp() -> str:
    """The time of day as it stands in the names of results."""
    return time.strftime("%Y%m%d%H%M%S")


@contextmanager
def result_files(folder: Path, suffix: str, stamp: str, kind: str = "csv") -> Iterator[tuple[Path, Path, Path]]:
    """Names for a result that nobody has: of the table while it is written, of the table, of the advice that goes with it.

    The table gets its name at the end, unless an exception came first. A second result within one second has `_1` behind
    its time: the old tools wrote over the first.
    """
    number = 0
    while True:
        ending = f"{suffix}_{stamp}{f'_{number}' if number else ''}"
        final, advice = folder / f"compare_result{ending}.{kind}", folder / f"advisor{ending}.txt"
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

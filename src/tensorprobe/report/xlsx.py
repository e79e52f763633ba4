"""The result table as a workbook: coloured, with filters, limited to as many rows as a spreadsheet can hold.

If there are more, rows that agree are left out in favour of later ones that do not, and the last row says how many are missing.
Text is always text, never a formula or a link.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import SettingsError
from tensorprobe.files import Replacement
from tensorprobe.model.comparison import COLUMNS
from tensorprobe.report.table import Batch, as_table
from tensorprobe.text import counted, sheet_text

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 1_048_576 - 2
"""The maximum rows of a sheet, without the header and the notice."""
_MOST_TEXT = 32_000
_WIDE = {"call": 36, "candidate_call": 36, "module": 28, "slot": 16, "note": 40}
_OPTIONS = {
    "constant_memory": True,
    "strings_to_formulas": False,
    "strings_to_urls": False,
    "strings_to_numbers": False,
}
RED, _GREY = {"bg_color": "#FFC7CE", "font_color": "#9C0006"}, {"bg_color": "#E0E0E0", "font_color": "#606060"}


def write_xlsx(
    path: str | os.PathLike[str], batches: Iterable[Batch], *, cap: int = 20_000, full_table: str = ""
) -> tuple[int, int]:
    """Write a workbook of at most `cap` rows; return how many were written and how many left out.

    The notice names `full_table` as the place of all rows. Raises SettingsError without xlsxwriter, or if a sheet cannot hold `cap`.
    """
    if not 1 <= cap <= MOST_ROWS:
        raise SettingsError(f"a sheet holds 1 to {MOST_ROWS:,} rows, not {cap:,}")
    table, left_out, hidden = _choose(batches, cap)
    with Replacement(path) as unfinished, open_workbook(unfinished) as workbook:
        _fill(workbook, table, _notice(left_out, hidden, full_table))
    return table.num_rows, left_out


def write_workbook(result: Any, path: Path) -> None:
    """Write the rows of a comparison as a workbook."""
    write_xlsx(path, result.rows.batches())


def load_xlsxwriter() -> Any:
    """Return the module that writes workbooks. Raises SettingsError if it is not installed."""
    try:
        import xlsxwriter
    except ImportError as error:
        raise SettingsError(
            "XLSX needs xlsxwriter, which is not installed. Install it: pip install 'tensorprobe[xlsx]', or write csv instead"
        ) from error
    return xlsxwriter


@contextmanager
def open_workbook(path: Path) -> Iterator[Any]:
    """Yield a new workbook in which text stays text. It is written at the end, if the block does not raise."""
    made = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:  # where rows are kept until the end
        workbook = load_xlsxwriter().Workbook(made, {**_OPTIONS, "tmpdir": scratch})
        yield workbook
        workbook.close()
    path.write_bytes(made.getbuffer())


def _choose(batches: Iterable[Batch], cap: int) -> tuple[pa.Table, int, int]:
    """Return the rows to show, how many are left out, and how many of those do not agree."""
    import pyarrow as pa
    import pyarrow.compute as compute

    head: list[pa.Table] = []
    tail: list[pa.Table] = []
    seen, telling, in_tail = 0, 0, 0
    for batch in batches:
        table = as_table(batch)
        room = max(cap - seen, 0)
        seen += table.num_rows
        telling += compute.sum(_tells(table)).as_py() or 0
        if room or not head:
            head.append(table.slice(0, room))
        if in_tail < cap:
            later = table.slice(room)
            tail.append(later.filter(_tells(later)).slice(0, cap - in_tail))
            in_tail += tail[-1].num_rows
    if not head:
        return as_table({name: [] for name in COLUMNS}), 0, 0
    first = pa.concat_tables(head)
    if seen <= cap:
        return first, 0, 0
    dull = compute.indices_nonzero(compute.invert(_tells(first)))
    swapped = min(in_tail, len(dull))
    given_up = set(dull.slice(len(dull) - swapped).to_pylist())
    kept = first.take(pa.array([row for row in range(first.num_rows) if row not in given_up], pa.int64()))
    shown = pa.concat_tables([kept, pa.concat_tables(tail).slice(0, swapped)])
    return shown, seen - cap, telling - (compute.sum(_tells(shown)).as_py() or 0)


def _tells(table: pa.Table) -> Any:
    """Return for each row whether it does not agree."""
    import pyarrow.compute as compute

    return compute.not_equal(table.column("verdict"), "agrees")


def _notice(left_out: int, hidden: int, full_table: str) -> str:
    if not left_out:
        return ""
    place = f" All rows: {full_table}" if full_table else ""
    return f"{counted(left_out, 'row')} left out, of which {hidden:,} do not agree.{place}"


def _fill(workbook: Any, table: pa.Table, notice: str) -> None:
    sheet = workbook.add_worksheet("comparison")
    heading = workbook.add_format({"bold": True, "bottom": 1})
    formats = _formats(workbook)
    for column, name in enumerate(COLUMNS):
        sheet.set_column(column, column, _WIDE.get(name, 12))
        sheet.write_string(0, column, name, heading)
    sheet.freeze_panes(1, 0)
    sheet.autofilter(0, 0, max(table.num_rows, 1), len(COLUMNS) - 1)
    verdict, status = table.column_names.index("verdict"), table.column_names.index("status")
    line = 0
    for batch in table.to_batches(max_chunksize=4096):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            line += 1
            safe = [sheet_text(value) if isinstance(value, str) else value for value in values]
            write_row(sheet, line, safe, formats[values[verdict], values[status] == "introduced"])
    if notice:
        sheet.write_string(line + 1, 0, notice, heading)


def _formats(workbook: Any) -> dict[tuple[str, bool], Any]:
    """(verdict, whether the call introduced the error) → format; made once, since a workbook stores each of them."""
    colours: dict[str, dict[str, Any]] = {"agrees": {}, "diverges": RED, "unmeasured": _GREY}
    return {
        (verdict, bold): workbook.add_format({**colour, "bold": True} if bold else colour) if colour or bold else None
        for verdict, colour in colours.items()
        for bold in (False, True)
    }


def write_row(sheet: Any, line: int, values: Sequence[Any], form: Any) -> None:
    """One row of a sheet, its texts made safe before; what is not finite is written as text."""
    for column, value in enumerate(values):
        if isinstance(value, bool):
            sheet.write_boolean(line, column, value, form)
        elif isinstance(value, str):
            sheet.write_string(line, column, value[:_MOST_TEXT], form)
        elif math.isfinite(value):
            sheet.write_number(line, column, value, form)
        else:
            sheet.write_string(line, column, "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf", form)

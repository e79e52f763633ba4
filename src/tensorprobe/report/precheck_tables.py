"""The tables of a precheck as CSV: a row for each call, and a row for each output and gradient.

The columns of the older tool come first, in its order and by its names, ours behind them. Every call has its rows, those
that another call stands for too. A success is True, False, SKIP (the message says why), or empty where there is no
backward. A row is one line whatever a name holds, and a text that a spreadsheet would run as a formula starts with an
apostrophe.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorprobe.model.precheck import CallCheck, Checked, Passed, Precheck
from tensorprobe.report.phrases import figure, place_of
from tensorprobe.text import sheet_text

RESULT_FILE = "accuracy_checking_result.csv"
DETAILS_FILE = "accuracy_checking_details.csv"

RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
OLDER_COLUMNS = (
    "Npu Name",
    "Bench Dtype",
    "NPU Dtype",
    "Shape",
    "Cosine Similarity",
    "Cosine Similarity Message",
    "Max Rel Error",
    "Max Rel Err Message",
    "Relative Error (dual thousandth)",
    "Relative Error (dual thousandth) Message",
    "Relative Error (dual ten thousandth)",
    "Relative Error (dual ten thousandth) Message",
    "Compare Builtin Type",
    "Builtin Type Message",
    "Pass",
)
_FIGURES = ("relative_l2", "max_abs", "ulp_max", "different", "nonfinite_different", "own_relative_l2")
_PLACE_COLUMNS = ("Data", "Step", "Rank", "Module", "Source", "Checked As")
DETAIL_COLUMNS = (
    *OLDER_COLUMNS,
    "Judged By",
    "Measured",
    "Allowed",
    "Relative L2",
    "Max Abs Error",
    "Max ULP",
    "Different",
    "Nonfinite Different",
    "CPU Relative L2",
    "Worst At",
    "Variant",
    "Message",
    *_PLACE_COLUMNS,
)
_SUCCESS: dict[Passed, str] = {"pass": "True", "fail": "False", "skip": "SKIP"}

Cell = str | int | float
Spell = Callable[[str], str]


def api_name(label: str) -> str:
    """`Functional.conv2d.0` for `Functional.conv2d.0.forward`, with what stands behind it: `(step 0, rank 1)`."""
    name, space, place = label.partition(" ")
    return f"{name.removesuffix('.forward')}{space}{place}"


def result_rows(precheck: Precheck, *, spell: Spell = api_name) -> Iterator[list[Cell]]:
    """A row for each call. `spell` gives a call the name that it has in the table."""
    for label, check in _every_call(precheck):
        yield [spell(label), _SUCCESS[check.forward], _backward(check), check.message]


def detail_rows(precheck: Precheck, *, spell: Spell = api_name) -> Iterator[list[Cell]]:
    """A row for each output and gradient; one for a call without any."""
    for label, check in _every_call(precheck):
        name, place = spell(label), _place(label, check)
        for checked in check.details:
            yield [*_details(name, checked), *place]
        if not check.details:
            yield [*_without_figures(f"{name}.forward", check.forward, check.message), *place]


def write_result(precheck: Precheck, path: Path) -> None:
    """Write the table of calls."""
    write_rows(path, RESULT_COLUMNS, result_rows(precheck))


def write_csv(result: Any, path: Path) -> None:
    """Write the table of calls of a precheck's result."""
    write_result(result.summary, path)


def write_parquet(result: Any, path: Path) -> None:
    """Write the table of outputs and gradients as Parquet. A figure that a row does not have is null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(zip(*detail_rows(result.summary), strict=True)) or [()] * len(DETAIL_COLUMNS)
    table = {
        name: [None if cell == "" else cell for cell in column]
        for name, column in zip(DETAIL_COLUMNS, columns, strict=True)
    }
    pq.write_table(pa.table(table), path)


def write_details(precheck: Precheck, path: Path) -> None:
    """Write the table of outputs and gradients."""
    write_rows(path, DETAIL_COLUMNS, detail_rows(precheck))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Write a table as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([sheet_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)


def _every_call(precheck: Precheck) -> Iterator[tuple[str, CallCheck]]:
    """Each call with the check that stands for it. Where several steps or ranks were looked at, every name says its own."""
    places = {(check.step, check.rank) for check in precheck.checks}
    several = len(places) > 1 or any(" (step " in label for check in precheck.checks for label in check.equal)
    for check in precheck.checks:
        own = f"{check.call} (step {check.step}, rank {check.rank})" if several else check.call
        for label in (own, *check.equal):
            yield label, check


def _backward(check: CallCheck) -> str:
    """Empty where there is no backward to be checked."""
    tried = check.forward == "skip" or any(checked.direction == "backward" for checked in check.details)
    return _SUCCESS[check.backward] if check.backward != "skip" or tried else ""


def _place(label: str, check: CallCheck) -> list[Cell]:
    source = "" if check.source is None else place_of(check.source, str)
    stands_for = check.call if label in check.equal else ""
    return [check.data, check.step, check.rank, check.module, source, stands_for]


def _details(name: str, checked: Checked) -> list[Cell]:
    row = f"{name}.{checked.direction}" + (f".{checked.slot}" if checked.slot else "")
    if checked.result == "skip" or not checked.slot:
        return _without_figures(row, checked.result, checked.message, checked.variant)

    def known(value: Cell) -> Cell:
        return value if checked.compared else ""

    return [
        row,
        checked.reference_dtype,
        checked.device_dtype,
        json.dumps(checked.shape),
        known(1.0 - checked.one_minus_cosine),
        _told(checked, "one_minus_cosine"),
        known(checked.max_rel),
        _told(checked, "max_rel"),
        known(checked.within_1e3),
        _told(checked, "over_1e3", "share_over_1e3"),
        known(checked.within_1e4),
        _told(checked, "share_over_1e4"),
        "",
        "",
        _SUCCESS[checked.result],
        checked.judged_by,
        checked.measured,
        checked.allowed,
        *(known("" if (value := getattr(checked, name)) is None else value) for name in _FIGURES),
        json.dumps(checked.place) if checked.place else "",
        checked.variant,
        checked.message,
    ]


def _without_figures(row: str, result: Passed, message: str, variant: str = "") -> list[Cell]:
    cells: list[Cell] = [""] * (len(DETAIL_COLUMNS) - len(_PLACE_COLUMNS))
    cells[0], cells[OLDER_COLUMNS.index("Pass")] = row, _SUCCESS[result]
    cells[-2], cells[-1] = variant, message
    return cells


def _told(checked: Checked, *names: str) -> str:
    """What is said beside a figure: that it is the one for which the result failed."""
    if checked.result != "fail" or checked.judged_by not in names:
        return ""
    return f"{figure(checked.judged_by, checked.measured, str)}, allowed {checked.allowed:.3g}"

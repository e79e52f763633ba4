"""The result table: nothing is lost in Parquet, nothing is run by a spreadsheet, no half file is ever there."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from openpyxl.utils.escape import unescape

from tensorprobe.errors import SettingsError
from tensorprobe.model.comparison import COLUMNS, Row
from tensorprobe.report import table as tables
from tensorprobe.report.table import TableWriter, arrow_schema, read_table
from tensorprobe.report.xlsx import MOST_ROWS, write_xlsx
from tests.report import made

HOSTILE_TEXTS = [
    "=1+1",
    "+1",
    "-1",
    "@SUM(1)",
    "\tx",
    "\rx",
    "'=1",
    "''-x",
    "\uff1d1",
    "'plain",
    'a"b',
    "a,b",
    "",
    "näme",
]


def rows(count: int, **changes: Any) -> list[Row]:
    return [made.row(index=index, call=f"Torch.add.{index // 4}.forward", **changes) for index in range(count)]


def write(path: Path, form: Any, *batches: Any) -> TableWriter:
    with TableWriter(path, form) as writer:
        for batch in batches:
            writer.write(batch)
    return writer


def read(path: Path) -> list[dict[str, Any]]:
    return pa.Table.from_batches(read_table(path), arrow_schema()).to_pylist()


def assert_same(found: Sequence[dict[str, Any]], expected: Sequence[Row]) -> None:
    assert len(found) == len(expected)
    for line, row in zip(found, expected, strict=True):
        for name in COLUMNS:
            value = getattr(row, name)
            same = line[name] == value or (value != value and line[name] != line[name])
            assert same, (name, value, line[name])


def test_the_schema_has_the_columns_in_order_with_their_types() -> None:
    schema = arrow_schema()
    assert schema.names == list(COLUMNS) == list(Row.__struct_fields__)
    types = {name: str(schema.field(name).type) for name in ("step", "max_abs", "bit_identical", "call", "status")}
    text = "dictionary<values=string, indices=int32, ordered=0>"
    assert types == {"step": "int64", "max_abs": "double", "bit_identical": "bool", "call": text, "status": text}


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_what_is_written_is_read_back(form: str, tmp_path: Path) -> None:
    held = [*rows(10, bias=-math.inf, max_rel=math.inf, mean_abs=1e-300, slope=0.1), *rows(3, bit_identical=True)]
    writer = write(tmp_path / f"r.{form}", form, made.columns(held[:4]), made.columns([]), made.columns(held[4:]))
    assert writer.rows == 13
    assert_same(read(tmp_path / f"r.{form}"), held)


def test_batches_of_any_make_are_taken(tmp_path: Path) -> None:
    columns = made.columns(rows(3))
    as_strings = pa.RecordBatch.from_pydict(columns)
    as_dictionaries = pa.RecordBatch.from_pydict(columns, schema=arrow_schema())
    write(tmp_path / "r.parquet", "parquet", columns, as_strings, as_dictionaries)
    assert_same(read(tmp_path / "r.parquet"), rows(3) * 3)


def test_a_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    for form in ("parquet", "csv"):
        write(tmp_path / f"r.{form}", form)
        assert read(tmp_path / f"r.{form}") == []
    assert parquet.read_schema(tmp_path / "r.parquet").equals(arrow_schema())
    assert (tmp_path / "r.csv").read_text().split(",")[0] == '"step"'


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_the_bytes_do_not_depend_on_the_batches(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP", 8)
    held = [made.row(index=index, module=f"m{index % 3}") for index in range(37)]
    whole = pa.RecordBatch.from_pydict(made.columns(held), schema=arrow_schema())
    write(tmp_path / "one", form, whole)
    write(tmp_path / "many", form, *(whole.slice(at, 5) for at in range(0, 37, 5)))
    write(tmp_path / "rows", form, *(made.columns([row]) for row in held))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes() == (tmp_path / "rows").read_bytes()
    if form == "parquet":
        assert parquet.ParquetFile(tmp_path / "one").num_row_groups == 5


def test_parquet_is_compressed_and_keeps_hostile_names(tmp_path: Path) -> None:
    held = [made.row(call=text, note=made.HOSTILE) for text in HOSTILE_TEXTS]
    write(tmp_path / "r.parquet", "parquet", made.columns(held))
    assert_same(read(tmp_path / "r.parquet"), held)
    column = parquet.ParquetFile(tmp_path / "r.parquet").metadata.row_group(0).column(3)
    assert (column.compression, "RLE_DICTIONARY" in column.encodings) == ("ZSTD", True)


def test_csv_has_no_formulas_and_one_line_for_each_row(tmp_path: Path) -> None:
    held = [made.row(call=text, note=made.HOSTILE) for text in HOSTILE_TEXTS]
    write(tmp_path / "r.csv", "csv", made.columns(held))
    text = (tmp_path / "r.csv").read_text(encoding="utf-8")
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    lines = list(csv.reader(text.splitlines()))
    assert lines[0] == list(COLUMNS)
    assert len(lines) == len(held) + 1
    calls = [line[3] for line in lines[1:]]
    assert calls == [
        "'=1+1", "'+1", "'-1", "'@SUM(1)", "\\tx", "\\rx", "''=1", "'''-x", "'\uff1d1", "'plain", 'a"b', "a,b", "", "näme",
    ]  # fmt: skip
    assert lines[1][list(COLUMNS).index("note")].startswith("'=cmd|' /C calc'!A0\\x1b[31m\\n::error::boo\\r%0A")


def test_csv_read_back_has_the_names_without_the_apostrophe(tmp_path: Path) -> None:
    texts = [text for text in HOSTILE_TEXTS if text.isprintable()]
    write(tmp_path / "r.csv", "csv", made.columns([made.row(call=text) for text in texts]))
    assert [line["call"] for line in read(tmp_path / "r.csv")] == texts
    write(tmp_path / "again.csv", "csv", *read_table(tmp_path / "r.csv"))
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "r.csv").read_bytes()


def test_the_line_of_the_first_diverging_row_is_known(tmp_path: Path) -> None:
    good = made.row(verdict="agrees")
    writer = write(tmp_path / "r.csv", "csv", made.columns([good] * 5), made.columns([good, made.row(call="HERE")] * 2))
    assert writer.first_diverging_line == 8
    assert "HERE" in (tmp_path / "r.csv").read_text().splitlines()[writer.first_diverging_line - 1]
    assert write(tmp_path / "r.csv", "csv", made.columns([good])).first_diverging_line is None


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_table_that_fails_leaves_the_old_one_and_nothing_else(form: Any, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="boom"), TableWriter(path, form) as writer:
        writer.write(made.columns(rows(3)))
        assert path.read_text() == "old"
        raise RuntimeError("boom")
    assert [held.name for held in tmp_path.iterdir()] == ["r"]
    assert path.read_text() == "old"


def test_a_table_that_cannot_get_its_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with pytest.raises(OSError), TableWriter(tmp_path / "r", "csv") as writer:
        writer.write(made.columns(rows(3)))
    assert [held.name for held in tmp_path.iterdir()] == ["r"]


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "r.csv", "csv") as writer:
        writer.write(made.columns(rows(1)))
        writer.close()
    assert len(read(tmp_path / "r.csv")) == 1


def test_other_columns_are_refused(tmp_path: Path) -> None:
    columns = made.columns(rows(1))
    columns["colour"] = columns.pop("step")
    with pytest.raises(SettingsError, match=r"columns of a batch .* \(missing: step; unknown: 'colour'\)"):
        write(tmp_path / "r.csv", "csv", columns)
    swapped = made.columns(rows(1))
    swapped["step"] = swapped.pop("step")
    with pytest.raises(SettingsError, match="in a different order"):
        write(tmp_path / "r.csv", "csv", swapped)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'parquet' or 'csv', not as 'feather'"):
        TableWriter(tmp_path / "r", "feather")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("r.parquet", "no parquet at all", "cannot be read as a result table"),
        ("r.csv", "a,b\n1,2\n", "columns of '.*r.csv' are not those"),
        ("r.csv", ",".join(COLUMNS) + "\n" + ",".join("x" * len(COLUMNS)) + "\n", "cannot be read as a result table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=words):
        list(read_table(tmp_path / name))


def sheet_of(path: Path) -> Any:
    return openpyxl.load_workbook(path).active


def test_a_workbook_holds_the_rows_with_colours(tmp_path: Path) -> None:
    held = [
        made.row(verdict="agrees", status="agrees"),
        made.row(status="introduced"),
        made.row(status="inherited", bias=-math.inf),
        made.row(verdict="unmeasured", status="unmeasured", bit_identical=True),
    ]
    assert write_xlsx(tmp_path / "r.xlsx", [made.columns(held[:2]), made.columns(held[2:])]) == (4, 0)
    sheet = sheet_of(tmp_path / "r.xlsx")
    lines = list(sheet.iter_rows(values_only=True))
    assert lines[0] == tuple(COLUMNS)
    found = [dict(zip(COLUMNS, line, strict=True)) for line in lines[1:]]
    assert [line["status"] for line in found] == ["agrees", "introduced", "inherited", "unmeasured"]
    assert (found[0]["max_abs"], found[0]["slope"], found[2]["bias"]) == (0.031, "NaN", "-inf")
    assert (found[0]["bit_identical"], found[3]["bit_identical"], found[0]["note"]) == (False, True, "")
    looks = [(cell.font.bold, cell.fill.fgColor.rgb) for cell in sheet["D"][1:]]
    assert looks == [(False, "00000000"), (True, "FFFFC7CE"), (False, "FFFFC7CE"), (False, "FFE0E0E0")]
    assert sheet.freeze_panes == "A2"
    assert sheet.auto_filter.ref == f"A1:{sheet.cell(5, len(COLUMNS)).coordinate}"
    assert [held.name for held in tmp_path.iterdir()] == ["r.xlsx"]


def test_a_workbook_runs_nothing(tmp_path: Path) -> None:
    texts = [*HOSTILE_TEXTS, made.HOSTILE, "http://example.com", "{=1}", "_x0041_", "x" * 40_000, "12"]
    write_xlsx(tmp_path / "r.xlsx", [made.columns([made.row(call=text) for text in texts])])
    cells = list(sheet_of(tmp_path / "r.xlsx")["D"][1:])
    assert {cell.data_type for cell in cells if cell.value is not None} <= {"s", "inlineStr"}
    assert not any(cell.hyperlink for cell in cells)
    assert [cell.value for cell in cells[:4]] == [
        "'=1+1",
        "'+1",
        "'-1",
        "'@SUM(1)",
    ]  # editing a cell starts none either
    assert [unescape(cell.value) for cell in cells[-4:-2]] == ["{=1}", "_x0041_"]
    assert (cells[-2].value, cells[-1].value) == ("x" * 32_000, "12")


def test_a_workbook_that_is_cut_says_so_and_keeps_what_does_not_agree(tmp_path: Path) -> None:
    held = [made.row(index=index, verdict="agrees", status="agrees") for index in range(100)]
    for index in (1, 50, 70, 71):
        held[index] = made.row(index=index)
    batches = [made.columns(held[at : at + 7]) for at in range(0, 100, 7)]
    assert write_xlsx(tmp_path / "r.xlsx", batches, cap=5, full_table="out/result.parquet") == (5, 95)
    lines = list(sheet_of(tmp_path / "r.xlsx").iter_rows(values_only=True))
    assert [line[2] for line in lines[1:6]] == [0, 1, 50, 70, 71]
    assert lines[6][0] == "95 rows left out, of which 0 do not agree. All rows: out/result.parquet"
    assert write_xlsx(tmp_path / "r.xlsx", batches, cap=2) == (2, 98)
    lines = list(sheet_of(tmp_path / "r.xlsx").iter_rows(values_only=True))
    assert [line[2] for line in lines[1:3]] == [1, 50]
    assert lines[3][0] == "98 rows left out, of which 2 do not agree."
    assert write_xlsx(tmp_path / "r.xlsx", batches, cap=100) == (100, 0)
    assert len(list(sheet_of(tmp_path / "r.xlsx").iter_rows())) == 101


def test_a_workbook_without_rows_has_its_header(tmp_path: Path) -> None:
    assert write_xlsx(tmp_path / "r.xlsx", []) == (0, 0)
    assert list(sheet_of(tmp_path / "r.xlsx").iter_rows(values_only=True)) == [tuple(COLUMNS)]


@pytest.mark.parametrize("cap", [0, -1, MOST_ROWS + 1])
def test_a_cap_that_no_sheet_holds_is_refused(cap: int, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a sheet holds 1 to 1,048,574 rows"):
        write_xlsx(tmp_path / "r.xlsx", [], cap=cap)


def test_a_missing_xlsxwriter_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(SettingsError, match=r"pip install 'tensorprobe\[xlsx\]'"):
        write_xlsx(tmp_path / "r.xlsx", [])


def test_a_workbook_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield made.columns(rows(1))
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_xlsx(tmp_path / "r.xlsx", broken())
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_xlsx(tmp_path / "folder", [made.columns(rows(1))])
    assert [held.name for held in tmp_path.iterdir()] == ["folder"]

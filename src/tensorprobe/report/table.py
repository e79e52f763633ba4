"""The result table: one row for each pair of slots, streamed to Parquet or CSV, and read back.

Batches have the columns of `model.comparison.COLUMNS`, as `pyarrow.RecordBatch` or as a dict of columns. Parquet keeps every value.
CSV is meant for spreadsheets: each row is one line, and a text that would be a formula starts with an apostrophe. A file gets its
name only when it is complete. Its bytes do not depend on how rows are split into batches.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_type_hints

from tensorprobe.errors import SettingsError
from tensorprobe.files import Replacement
from tensorprobe.model.comparison import COLUMNS, Row
from tensorprobe.text import FORMULA, printable

if TYPE_CHECKING:
    import pyarrow as pa

Batch: TypeAlias = "pa.RecordBatch | Mapping[str, Any]"
Form = Literal["parquet", "csv"]

ROW_GROUP = 65_536
"""The number of rows in memory before they are written."""
_UNPRINTABLE = r"[\pC\x{2028}\x{2029}]"


@functools.cache
def arrow_schema() -> pa.Schema:
    """Return the columns of `Row` with their types. Texts are dictionaries, because they repeat."""
    import pyarrow as pa

    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    text = pa.dictionary(pa.int32(), pa.string())
    hints = get_type_hints(Row)
    return pa.schema([pa.field(name, types.get(hints[name], text)) for name in COLUMNS])


def as_table(batch: Batch) -> pa.Table:
    """Return the batch in the types of the schema, texts as plain strings. Raises SettingsError for other columns."""
    import pyarrow as pa

    names = list(batch) if isinstance(batch, Mapping) else batch.schema.names
    _check_columns(names, "a batch")
    held = pa.table(dict(batch)) if isinstance(batch, Mapping) else pa.Table.from_batches([batch])
    return held.cast(_plain_schema())


class TableWriter:
    """Writes batches to one file. As a context manager, it writes no file if the block raises."""

    def __init__(self, path: str | os.PathLike[str], form: Form) -> None:
        self.path = Path(path)
        self.rows = 0
        self.first_diverging_line: int | None = None
        """The line of the first diverging row in the CSV. The header is line 1."""
        self._replacement = Replacement(path)
        self._form = form
        self._waiting: list[pa.Table] = []
        self._held = 0
        self._ended = False
        self._file = _open(self._replacement.unfinished, form)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def write(self, batch: Batch) -> None:
        """Add the rows of a batch, in order."""
        import pyarrow.compute as compute

        table = as_table(batch)
        found = compute.index(table.column("verdict"), "diverges").as_py()
        if self.first_diverging_line is None and found >= 0:
            self.first_diverging_line = self.rows + found + 2
        self.rows += table.num_rows
        self._waiting.append(table)
        self._held += table.num_rows
        if self._held >= ROW_GROUP:
            self._flush(whole=False)

    def close(self) -> None:
        """Write the rest and give the file its name; remove it if that fails. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        try:
            self._flush(whole=True)
            self._file.close()
        except BaseException:
            self.abandon()
            raise
        self._replacement.__exit__(None)

    def abandon(self) -> None:
        """Remove what was written."""
        self._ended = True
        with contextlib.suppress(Exception):  # report the error that led here instead
            self._file.close()
        self._replacement.__exit__(Exception)

    def _flush(self, *, whole: bool) -> None:
        """Write groups of exactly ROW_GROUP rows, so that equal rows give equal bytes; with `whole`, also the rest."""
        import pyarrow as pa

        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        while table.num_rows >= ROW_GROUP or (whole and table.num_rows):
            group, table = table.slice(0, ROW_GROUP).combine_chunks(), table.slice(ROW_GROUP)
            self._write_group(group)
        self._waiting, self._held = [table], table.num_rows

    def _write_group(self, group: pa.Table) -> None:
        if self._form == "csv":
            self._file.write_table(_map_texts(group, _safe))
        else:
            self._file.write_table(_map_texts(group, lambda text: text.dictionary_encode()), row_group_size=ROW_GROUP)


def write_csv(result: Any, path: Path) -> None:
    """Write the rows of a comparison as CSV."""
    _write_rows(result, path, "csv")


def write_parquet(result: Any, path: Path) -> None:
    """Write the rows of a comparison as Parquet."""
    _write_rows(result, path, "parquet")


def _write_rows(result: Any, path: Path, form: Form) -> None:
    with TableWriter(path, form) as writer:
        for batch in result.rows.batches():
            writer.write(batch)


def read_table(path: str | os.PathLike[str]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a table that `TableWriter` wrote, in the types of the schema. Raises SettingsError for other files."""
    import pyarrow as pa

    schema = arrow_schema()
    try:
        for table in _read_csv(path) if Path(path).suffix == ".csv" else _read_parquet(path):
            table.validate(full=True)  # texts of a damaged file may not be UTF-8
            demand_values(table, path)
            yield from table.cast(schema).combine_chunks().to_batches()
    except (pa.ArrowException, UnicodeDecodeError, OverflowError, OSError) as error:
        raise SettingsError(f"{os.fspath(path)!r} cannot be read as a result table: {error}") from error


def demand_values(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Raise SettingsError if a value is missing: what was not measured is NaN or -1."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            raise SettingsError(
                f"{os.fspath(path)!r} cannot be read as a result table: {name!r} has no value in {column.null_count:,} rows."
            )


def _read_parquet(path: str | os.PathLike[str]) -> Iterator[pa.Table]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        _check_columns(file.schema_arrow.names, repr(os.fspath(path)))
        for batch in file.iter_batches(batch_size=ROW_GROUP):
            yield pa.Table.from_batches([batch])


def _read_csv(path: str | os.PathLike[str]) -> Iterator[pa.Table]:
    import pyarrow as pa
    from pyarrow import csv

    options = csv.ConvertOptions(
        column_types=_plain_schema(), null_values=[], true_values=["true"], false_values=["false"]
    )
    with csv.open_csv(path, convert_options=options) as reader:
        _check_columns(reader.schema.names, repr(os.fspath(path)))
        for batch in reader:
            yield _map_texts(pa.Table.from_batches([batch]), _unsafe)


def _open(path: Path, form: Form) -> Any:
    if form == "csv":
        from pyarrow import csv

        return csv.CSVWriter(path, _plain_schema())
    if form == "parquet":
        import pyarrow.parquet as parquet

        texts = [name for name, kind in zip(COLUMNS, _plain_schema().types, strict=True) if kind == "string"]
        return parquet.ParquetWriter(path, arrow_schema(), compression="zstd", use_dictionary=texts)
    raise SettingsError(f"a table is written as 'parquet' or 'csv', not as {form!r}")


@functools.cache
def _plain_schema() -> pa.Schema:
    """Return the schema with texts as plain strings, which CSV needs and every batch is cast to first."""
    import pyarrow as pa

    return pa.schema(
        [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field for field in arrow_schema()]
    )


def _map_texts(table: pa.Table, change: Any) -> pa.Table:
    import pyarrow as pa

    columns = [change(column) if pa.types.is_string(column.type) else column for column in table.columns]
    return pa.table(columns, names=table.column_names)


def _safe(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Put the text on one line, and escape formulas."""
    import pyarrow as pa
    import pyarrow.compute as compute

    def change(distinct: pa.Array) -> pa.Array:
        if compute.any(compute.match_substring_regex(distinct, _UNPRINTABLE)).as_py():
            distinct = pa.array([printable(held) for held in distinct.to_pylist()], pa.string())
        return compute.replace_substring_regex(distinct, f"^({FORMULA})", r"'\1")

    return _each_distinct(text, change)


def _unsafe(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Remove the apostrophe that `_safe` added."""
    import pyarrow.compute as compute

    return _each_distinct(text, lambda distinct: compute.replace_substring_regex(distinct, f"^'({FORMULA})", r"\1"))


def _each_distinct(text: pa.ChunkedArray, change: Any) -> pa.ChunkedArray:
    """Apply `change` to each distinct text once."""
    import pyarrow as pa

    encoded = text.combine_chunks().dictionary_encode()
    return pa.chunked_array([change(encoded.dictionary).take(encoded.indices)])


def _check_columns(names: Iterable[str], what: str) -> None:
    given = list(names)
    if given == list(COLUMNS):
        return
    missing = [name for name in COLUMNS if name not in given]
    unknown = [name for name in given if name not in COLUMNS]
    if missing or unknown:
        facts = f"missing: {', '.join(missing[:5]) or 'none'}; unknown: {', '.join(map(repr, unknown[:5])) or 'none'}"
    else:
        facts = "in a different order"
    raise SettingsError(f"the columns of {what} are not those of a result table ({facts})")

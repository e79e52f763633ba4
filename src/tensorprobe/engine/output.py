"""The folder in which a comparison puts its files: the table, `summary.json`, `advisor.txt`.

Files are made in a hidden folder beside the others and put in place when all of them are complete, `summary.json` last. When
the comparison fails nothing of it is left, and what an earlier one had written stays as it was. Files that are not ours
are never touched. The folder may be behind a URL: then files are made here and copied there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from tensorprobe.engine.remote import RemoteFolder, is_url, local_path
from tensorprobe.engine.result import Result, Rows
from tensorprobe.engine.settings import TableForm
from tensorprobe.engine.tasks import as_refusal
from tensorprobe.errors import FileRefused, SettingsError
from tensorprobe.files import read_file
from tensorprobe.model.comparison import Comparison
from tensorprobe.report.advisor import render_advice
from tensorprobe.report.table import TableWriter, read_table
from tensorprobe.standard_json import decode, encode

_TABLES = ("result.parquet", "result.csv", "result.xlsx")


class Output:
    """An output folder, open for one comparison; a context manager."""

    def __init__(self, place: str | os.PathLike[str], *, create: bool = True) -> None:
        self._folder = local_path(place)
        self._remote = RemoteFolder(os.fspath(place)) if self._folder is None else None
        self.said = os.fspath(place) if is_url(os.fspath(place)) else str(self._folder)
        self._create = create
        self._created = False
        self._held = False
        self.stage = Path()
        """Where files are made."""

    def __enter__(self) -> Output:
        folder = self._folder
        try:
            if folder is not None and self._create:
                self._created = not folder.exists()
                folder.mkdir(parents=True, exist_ok=True)
            self.stage = Path(tempfile.mkdtemp(prefix=".tensorprobe-", dir=folder))
        except OSError as error:
            raise SettingsError(f"'{self.said}' cannot be used as an output folder: {error.strerror}.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._held:
            shutil.rmtree(self.stage, ignore_errors=True)
        if kind is not None and self._created and self._folder is not None:
            with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                self._folder.rmdir()
        if isinstance(error, OSError) and (refusal := as_refusal(error)) is not None:
            raise refusal from error

    def names(self) -> list[str]:
        """The files that the folder itself holds, sorted."""
        if self._remote is not None:
            return [name for name in self._remote.names() if "/" not in name]
        assert self._folder is not None
        return sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())

    def held(self, names: Sequence[str]) -> list[Path]:
        """Files of the folder, where they can be read."""
        if self._remote is None:
            assert self._folder is not None
            return [self._folder / name for name in names]
        copies = {name: self.stage / name for name in names}
        self._remote.get(copies)
        return list(copies.values())

    def publish(self, names: Sequence[str]) -> None:
        """Put files that were made in the stage in place, in this order."""
        if self._remote is not None:
            self._remote.put({name: self.stage / name for name in names})
            return
        assert self._folder is not None
        for name in names:
            (self.stage / name).replace(self._folder / name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of ours."""
        if self._remote is not None:
            self._remote.remove(names)
            return
        assert self._folder is not None
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def rows_of(self, table: str, count: int) -> Rows:
        """The rows of a table that was published. Of one behind a URL the copy here is kept as long as these are."""
        if self._folder is not None:
            return Rows(self._folder / table, count)
        rows = Rows(self.stage / table, count)
        self._held = True
        weakref.finalize(rows, shutil.rmtree, self.stage, ignore_errors=True)
        return rows


def write_result(
    summary: Comparison, output: Output, parts: Sequence[Path], *, table: TableForm, workbook: bool
) -> Result:
    """Make every file from the answer and the rows of the ranks, put all in place, and return them as a result."""
    name = f"result.{table}"
    path = output.stage / name
    if table == "parquet" and len(parts) == 1 and parts[0].parent == path.parent:
        parts[0].replace(path)  # the rows of one rank are the table: the same bytes, not written twice
    else:
        with TableWriter(path, table) as writer:
            for part in parts:
                for batch in read_table(part):
                    writer.write(batch)
    names, notices = [name], []
    if workbook:
        from tensorprobe.report.xlsx import write_xlsx

        written, left_out = write_xlsx(output.stage / "result.xlsx", read_table(path), full_table=name)
        names.append("result.xlsx")
        if left_out:
            notices.append(f"result.xlsx holds {written:,} rows; {left_out:,} more are in the table beside it.")
    write_text(output.stage / "advisor.txt", render_advice(summary, line=_line_of(summary, path)))
    write_text(output.stage / "summary.json", encode(summary, indent=2) + "\n")
    stale = _stale_tables(output, names)
    output.publish([*names, "advisor.txt", "summary.json"])
    output.remove(stale)
    return Result(summary, output.rows_of(name, summary.rows), notices=notices, table=name)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 with plain line ends, whatever the system prefers."""
    path.write_bytes(text.encode("utf-8"))


def _stale_tables(output: Output, fresh: Sequence[str]) -> list[str]:
    """Tables of an earlier comparison that this one does not replace; without its summary they may be anybody's."""
    names = output.names()
    old = [name for name in _TABLES if name in names and name not in fresh]
    if not old or "summary.json" not in names:
        return []
    try:
        decode(read_file(output.held(["summary.json"])[0]), Comparison, what="a comparison")
    except (SettingsError, FileRefused):
        return []
    return old


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

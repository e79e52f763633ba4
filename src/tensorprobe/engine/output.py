"""The output folder of a comparison: the table, `summary.json`, `advisor.txt`, `replay.py`, `evidence.json`, the page (`report.html`).

Files are made in a hidden folder and moved into place when all are complete, `summary.json` last. If
the comparison fails, it leaves nothing behind, and the files of an earlier one stay. Files that are not ours
are never touched. The folder may be a URL; then files are made here and copied there.
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
from tensorprobe.model.diff import CallEvidence
from tensorprobe.report.advisor import render_advice
from tensorprobe.report.forms import FORMS
from tensorprobe.report.page.comparison import comparison_page
from tensorprobe.report.page.html import to_html
from tensorprobe.report.table import TableWriter, read_table
from tensorprobe.standard_json import decode, encode

EVIDENCE_FILE, PAGE_FILE = "evidence.json", "report.html"
REPLAY_FILES = ("replay.py", "replay.safetensors")
"""The script that runs the diverging call alone, and its tensors."""
_TABLES = ("result.parquet", "result.csv")
_FORM_FILES = tuple(f"result.{name}" for name, form in FORMS.items() if form.is_file and name != "html")
"""What `compare` writes for `--format NAME` besides the page."""


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
        """The folder in which files are made."""

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
            with contextlib.suppress(OSError):  # another process has put something there
                self._folder.rmdir()
        if isinstance(error, OSError) and (refusal := as_refusal(error)) is not None:
            raise refusal from error

    def names(self) -> list[str]:
        """Return the files in the folder, sorted."""
        if self._remote is not None:
            return [name for name in self._remote.names() if "/" not in name]
        assert self._folder is not None
        return sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())

    def held(self, names: Sequence[str]) -> list[Path]:
        """Return local paths of files in the folder."""
        if self._remote is None:
            assert self._folder is not None
            return [self._folder / name for name in names]
        copies = {name: self.stage / name for name in names}
        self._remote.get(copies)
        return list(copies.values())

    def publish(self, names: Sequence[str]) -> None:
        """Move finished files into place, in this order."""
        if self._remote is not None:
            self._remote.put({name: self.stage / name for name in names})
            return
        assert self._folder is not None
        for name in names:
            (self.stage / name).replace(self._folder / name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove our files."""
        if self._remote is not None:
            self._remote.remove(names)
            return
        assert self._folder is not None
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def rows_of(self, table: str, count: int) -> Rows:
        """Return the rows of a published table. The local copy of a remote table lives as long as they do."""
        if self._folder is not None:
            return Rows(self._folder / table, count)
        rows = Rows(self.stage / table, count)
        self._held = True
        weakref.finalize(rows, shutil.rmtree, self.stage, ignore_errors=True)
        return rows


def write_result(
    summary: Comparison,
    output: Output,
    parts: Sequence[Path],
    *,
    evidence: Sequence[CallEvidence],
    table: TableForm,
    workbook: bool,
) -> Result:
    """Make every file from the answer and the rows of the ranks, publish them, and return the result."""
    name = f"result.{table}"
    path = output.stage / name
    if table == "parquet" and len(parts) == 1 and parts[0].parent == path.parent:
        parts[0].replace(path)  # one rank: its rows are the table
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
    write_text(output.stage / EVIDENCE_FILE, encode(evidence) + "\n")
    write_text(output.stage / PAGE_FILE, to_html(comparison_page(summary, lambda: read_table(path), evidence)))
    names += [each for each in REPLAY_FILES if (output.stage / each).exists()]
    stale = _stale_files(output, names)
    output.publish([*names, EVIDENCE_FILE, PAGE_FILE, "advisor.txt", "summary.json"])
    output.remove(stale)
    return Result(summary, output.rows_of(name, summary.rows), evidence=evidence, notices=notices, table=name)


def read_result(folder: str | os.PathLike[str]) -> Result:
    """Return the result in an output folder. SettingsError if it holds none, or one that is damaged."""
    place = Path(folder)
    names = [name for name in _TABLES if (place / name).is_file()]
    try:
        summary = decode(read_file(place / "summary.json"), Comparison, what="a comparison")
        held = read_file(place / EVIDENCE_FILE) if (place / EVIDENCE_FILE).is_file() else b"[]"
        evidence = decode(held, list[CallEvidence], what="the evidence of a comparison")
    except OSError as error:
        raise SettingsError(f"'{place}' holds no result that can be read: {error.strerror}.") from error
    if not names:
        raise SettingsError(f"'{place}' holds no table: {' or '.join(_TABLES)}.")
    rows = Rows(place / names[0], summary.rows)
    return Result(summary, rows, evidence=evidence, table=names[0])


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8 with plain line ends on every system."""
    path.write_bytes(text.encode("utf-8"))


def _stale_files(output: Output, fresh: Sequence[str]) -> list[str]:
    """Return files of an earlier comparison to remove. Without its summary they may not be ours."""
    names = output.names()
    old = [name for name in (*_FORM_FILES, *REPLAY_FILES) if name in names and name not in fresh]
    if not old or "summary.json" not in names:
        return []
    try:
        decode(read_file(output.held(["summary.json"])[0]), Comparison, what="a comparison")
    except (SettingsError, FileRefused):
        return []
    return old


def _line_of(summary: Comparison, path: Path) -> int | None:
    """Return the line of the first divergence in the CSV. The header is line 1."""
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

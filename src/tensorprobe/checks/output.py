"""The folder of a precheck: a journal while it goes on; the tables, the page, `summary.json` and scripts of failing calls at its end.

A folder that is absent or empty is used, and one that holds an earlier precheck is used again; any other is refused. What was
written of a precheck that was stopped stays, so that it can be continued. One that could not begin leaves everything as it was.

The first line of the journal (`checks.jsonl`) says what is checked and how. Every other line is one outcome, written in one piece
and flushed. A last line without its end was cut by a kill and is dropped. Only one precheck may write at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from tensorprobe.checks.plan import Answer, Finished
from tensorprobe.errors import FileRefused, RunDamaged, SettingsError
from tensorprobe.files import Replacement, demand_file
from tensorprobe.model.diff import CallEvidence
from tensorprobe.model.precheck import Precheck
from tensorprobe.record.lines import MAX_LINE
from tensorprobe.report.page.checks import checks_page
from tensorprobe.report.page.html import to_html
from tensorprobe.report.precheck_tables import DETAILS_FILE, RESULT_FILE, write_details, write_result
from tensorprobe.standard_json import encode

SUMMARY_FILE, EVIDENCE_FILE, PAGE_FILE = "summary.json", "evidence.json", "report.html"
_FAILURES = "failures"
_SHOWN = 5
FILE = "checks.jsonl"
FORMAT = "tensorprobe-precheck"
_WORDS = {"run": "of the run", "tool": "made by tensorprobe", "torch": "made with torch"}


class Output:
    """An output folder, open for one precheck; a context manager."""

    def __init__(self, place: str | os.PathLike[str], header: Header, *, resume: bool) -> None:
        self.folder = Path(place)
        self._header = header
        self._resume = resume
        self._created = self._first = False

    @property
    def finished(self) -> list[Finished]:
        """The outcomes of the precheck that is continued."""
        return self._journal.finished

    def __enter__(self) -> Output:
        folder = self.folder
        if self._resume and not (folder / FILE).is_file():
            raise SettingsError(f"'{folder}' holds no precheck that could be continued (no {FILE}).")
        try:
            self._created = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(entry.name for entry in folder.iterdir())
            if names and not is_journal(folder / FILE):
                raise SettingsError(
                    f"'{folder}' holds files that are not of a precheck: {', '.join(names[:_SHOWN])}"
                    f"{', …' if len(names) > _SHOWN else ''}.\n  Choose a folder that is empty or does not exist."
                )
            self._first = not names
            self._journal = Journal(folder / FILE, self._header, resume=self._resume)
        except OSError as error:
            raise SettingsError(f"'{folder}' cannot be used as an output folder: {error.strerror}.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        if self._first and not self._journal.begun:
            (self.folder / FILE).unlink(missing_ok=True)
            if self._created:
                with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                    self.folder.rmdir()

    def keep(self, answer: Answer) -> Finished:
        """Write the script of a failing call and the outcome to disk, after `begin`; return the outcome."""
        finished, check = answer.finished, answer.finished.check
        if answer.script:
            from tensorprobe.replay.script import Script  # imports torch

            try:
                script = Script(answer.script, answer.tensors)
                path = script.write(self.folder.absolute() / _FAILURES, check.call, at=(check.step, check.rank))
                finished = msgspec.structs.replace(finished, replay=str(path))
            except OSError as error:
                finished = msgspec.structs.replace(finished, trouble=f"{check.call} could not be saved: {error}")
        self._journal.append(finished)
        return finished

    def publish(self, summary: Precheck, evidence: Sequence[CallEvidence]) -> None:
        """Put the tables in place, then the summary; each is there only when it is complete."""
        self.begin()
        files: list[tuple[str, Callable[[Precheck, Path], object]]] = [
            (RESULT_FILE, write_result),
            (DETAILS_FILE, write_details),
            (EVIDENCE_FILE, lambda _, path: _write_json(evidence, path)),
            (PAGE_FILE, lambda held, path: path.write_text(to_html(checks_page(held, evidence)), encoding="utf-8")),
            (SUMMARY_FILE, _write_json),
        ]
        for name, write in files:
            with Replacement(self.folder / name) as unfinished:
                write(summary, unfinished)

    def begin(self) -> None:
        """Remove the files of an earlier precheck, once, before the first call is run."""
        if self._journal.begun:
            return
        self._journal.begin()
        for name in (RESULT_FILE, DETAILS_FILE, EVIDENCE_FILE, PAGE_FILE, SUMMARY_FILE):
            (self.folder / name).unlink(missing_ok=True)
        failures = self.folder / _FAILURES
        if failures.is_dir() and not failures.is_symlink():
            shutil.rmtree(failures)


def _write_json(held: object, path: Path) -> None:
    path.write_bytes(encode(held, indent=2).encode() + b"\n")


class Header(msgspec.Struct, frozen=True):
    """What the outcomes belong to."""

    run: str
    tool: str
    torch: str
    plan: str
    settings: dict[str, Any]
    format: str = FORMAT
    version: int = 1


class Journal:
    """The open journal of one precheck. `finished` are the outcomes of the one that is continued.

    What an earlier precheck had written is there until `begin`.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool) -> None:
        self._header = header
        if resume or path.exists() or path.is_symlink():
            demand_file(path)
        self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | (0 if resume else os.O_CREAT), 0o666), "r+b")
        self.finished: list[Finished] = []
        self.begun = resume
        try:
            _lock(self._file, path)
            if resume:
                self._continue(path)
        except BaseException:
            self._file.close()
            raise

    def begin(self) -> None:
        """Take the place of an earlier journal."""
        self.begun = True
        self._file.truncate(0)
        self._write(self._header)

    def append(self, finished: Finished) -> None:
        """Add an outcome."""
        self._write(finished)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _write(self, line: Header | Finished) -> None:
        self._file.write(encode(line).encode() + b"\n")
        self._file.flush()

    def _continue(self, path: Path) -> None:
        lines = _whole_lines(self._file)
        first = next(lines, b"")
        _demand_same(path, _read_header(first), self._header)
        end = len(first)
        for number, line in enumerate(lines, start=2):
            try:
                self.finished.append(msgspec.convert(msgspec.json.decode(line), Finished, strict=False))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise RunDamaged(
                    f"line {number} of '{path}' cannot be read: {error}.\n  Start anew in another folder."
                ) from None
            end += len(line)
        self._file.seek(end)
        self._file.truncate()


def is_journal(path: Path) -> bool:
    """Whether the file is a journal, whatever it is of; an empty one was stopped before its first outcome."""
    try:
        demand_file(path)
        with path.open("rb") as file:
            return path.stat().st_size == 0 or _read_header(next(_whole_lines(file), b"")) is not None
    except (OSError, FileRefused):
        return False


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"another precheck is writing into '{path.parent}' just now.") from None
    except (ImportError, OSError):
        return  # a system without locks: whoever writes there twice at once has been careless


def _read_header(line: bytes) -> Header | None:
    """The header in the first line of a journal; None when it is none that we know."""
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return header if (header.format, header.version) == (FORMAT, 1) else None


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0, os.SEEK_SET)
    while line := file.readline(MAX_LINE):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == MAX_LINE:
            raise RunDamaged(
                f"'{file.name}' has a line of more than {MAX_LINE:,} bytes. It was not read.\n  Start anew in another folder."
            )


def _demand_same(path: Path, held: Header | None, header: Header) -> None:
    if held is None:
        raise SettingsError(f"'{path}' is not a journal of a precheck: there is nothing to continue.")
    if held == header:
        return
    differing = [
        f"it is {words} {getattr(held, key)}, not {getattr(header, key)}"
        for key, words in _WORDS.items()
        if getattr(held, key) != getattr(header, key)
    ]
    differing += [
        f"{key} was {held.settings.get(key)!r}, not {header.settings.get(key)!r}"
        for key in {**held.settings, **header.settings}
        if held.settings.get(key) != header.settings.get(key)
    ]
    facts = "; ".join(differing) or "the run is not the one that it was"
    raise SettingsError(
        f"'{path.parent}' holds a precheck that is another: {facts}.\n"
        "  Continue it with the same settings, or start anew in another folder."
    )

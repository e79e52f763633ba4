"""The folder in which a precheck puts its files: the journal while it goes on, the tables and `summary.json` at its end.

A folder that is absent or empty is used, and one that holds an earlier precheck is used again; any other is refused. What was
written of a precheck that was stopped stays, to be continued. One that could not even begin leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType

from tensorprobe.checks.journal import FILE, Header, Journal, is_journal
from tensorprobe.checks.messages import Finished
from tensorprobe.errors import SettingsError
from tensorprobe.model.precheck import Precheck
from tensorprobe.report.precheck_tables import DETAILS_FILE, RESULT_FILE, write_details, write_result
from tensorprobe.standard_json import encode

SUMMARY_FILE = "summary.json"
_FAILURES = "failures"
_SHOWN = 5


class Output:
    """An output folder, open for one precheck; a context manager."""

    def __init__(self, place: str | os.PathLike[str], header: Header, *, resume: bool) -> None:
        self.folder = Path(place)
        self._header = header
        self._resume = resume
        self._created = self._first = False

    @property
    def failures(self) -> Path:
        """Where failing calls are saved."""
        return self.folder.absolute() / _FAILURES

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

    def append(self, finished: Finished) -> None:
        """Remember an outcome, after `begin`."""
        self._journal.append(finished)

    def publish(self, summary: Precheck) -> None:
        """Put the tables in place, then the summary; each is there only when it is complete."""
        self.begin()
        for name, write in ((RESULT_FILE, write_result), (DETAILS_FILE, write_details), (SUMMARY_FILE, _write_summary)):
            partial = self.folder / f".{name}.partial"
            write(summary, partial)
            partial.replace(self.folder / name)

    def begin(self) -> None:
        """Forget an earlier precheck: its files would be taken for those of this one. To be called before the first call is
        run, whose failure is saved before its outcome comes; nothing when it was called before.
        """
        if self._journal.begun:
            return
        self._journal.begin()
        for name in (RESULT_FILE, DETAILS_FILE, SUMMARY_FILE):
            (self.folder / name).unlink(missing_ok=True)
        failures = self.folder / _FAILURES
        if failures.is_dir() and not failures.is_symlink():
            shutil.rmtree(failures)


def _write_summary(summary: Precheck, path: Path) -> None:
    path.write_bytes(encode(summary, indent=2).encode() + b"\n")

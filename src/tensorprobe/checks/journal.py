"""`checks.jsonl`: the outcome of each check as it comes, so that a precheck that was killed can be continued.

The first line says what is being checked and how; every other line is one outcome, written in one piece and handed to the
system at once. A last line without its end was torn by a kill and is dropped. While a precheck writes, nobody else may.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tensorprobe.checks.messages import Finished
from tensorprobe.errors import RunDamaged, SettingsError
from tensorprobe.standard_json import encode

FILE = "checks.jsonl"
FORMAT = "tensorprobe-precheck"
_WORDS = {"run": "of the run", "tool": "made by tensorprobe", "torch": "made with torch"}


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
            except msgspec.MsgspecError as error:
                raise RunDamaged(
                    f"line {number} of '{path}' cannot be read: {error}.\n  Start anew in another folder."
                ) from None
            end += len(line)
        self._file.seek(end)
        self._file.truncate()


def is_journal(path: Path) -> bool:
    """Whether the file is a journal, whatever it is of; an empty one was stopped before its first outcome."""
    try:
        with path.open("rb") as file:
            return path.stat().st_size == 0 or _read_header(next(_whole_lines(file), b"")) is not None
    except OSError:
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
    except (msgspec.MsgspecError, RecursionError):
        return None
    return header if (header.format, header.version) == (FORMAT, 1) else None


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0, os.SEEK_SET)
    for line in file:
        if line.endswith(b"\n"):
            yield line


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

"""The text files of one rank: calls and stacks of the current step, and the rank's part of the manifest.

Written by the recorder only. Disk errors are counted and reported in the coverage, not raised.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import socket
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensorprobe.files import Replacement
from tensorprobe.model.event import NO_TOKEN, Event, SlotEvent
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.manifest import Coverage, RankPart
from tensorprobe.numerics.summary import Moments, json_summary
from tensorprobe.record.apart import OwnFile
from tensorprobe.record.messages import CloseNote, StackNote
from tensorprobe.record.tensor_store import TensorStore

_FLUSH_BYTES = 8 << 20
_FLUSH_LINES = 2000


class Stored(NamedTuple):
    """A stored tensor: its statistics, digest, size, and offset or None."""

    moments: Moments
    digest: str
    nbytes: int
    offset: int | None


class Closed(NamedTuple):
    """A step that was written: where, how many calls it has, and how long its files are."""

    folder: Path
    calls: int
    sizes: dict[str, int]


class RunPlace:
    """The folder of a run, held open, so that it is found again if it is moved while it is written."""

    def __init__(self, run: Path) -> None:
        self.first = run
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(run, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        held = Path(f"/proc/self/fd/{self._fd}")
        self.path = held if self._fd != -1 and held.exists() else run
        """A path that leads to it, wherever it is; its first path if the system has no such paths."""

    def is_deleted(self) -> bool:
        """Return whether it was deleted."""
        return self._fd != -1 and os.fstat(self._fd).st_nlink == 0

    def moved_to(self) -> str | msgspec.UnsetType:
        """Return where it is, if it was moved."""
        if self._fd == -1:
            return msgspec.UNSET
        with contextlib.suppress(OSError):
            if self.first.samefile(self.path):
                return msgspec.UNSET
        return os.fspath(self.path.resolve())

    def close(self) -> None:
        """Close it."""
        if self._fd != -1:
            os.close(self._fd)
            self._fd = -1


class StepFiles:
    """Writes calls and stacks for the recorder; `tensors` takes the bytes. `lock` is the rank's part, open and locked."""

    def __init__(
        self, place: RunPlace, rank: int, tensors: TensorStore, *, trainer_pid: int = 0, lock: int = -1
    ) -> None:
        self._place, self._run, self._rank = place, place.path, rank
        self._trainer_pid, self._lock = trainer_pid, None if lock == -1 else OwnFile(lock)
        self._ended: int | None = None
        self._calls_in_file = 0
        self.tensors = tensors
        self._encoder = msgspec.json.Encoder()
        self._step = 0
        self._steps: dict[int, Closed] = {}
        self._calls_fd = -1
        self._calls_size = 0
        self._stacks_fd = -1
        self._lines: list[bytes] = []
        self._calls_waiting = 0
        self._flushed_at = 0
        self._lost_calls = 0
        self._failures: Counter[str] = Counter()
        self.step(0)

    def step(self, step: int) -> None:
        """Close the files of the step before; those of the new one are made when something comes."""
        self._close_step()
        self._step = step
        self._folder = self._run / f"step{step}" / f"rank{self._rank}"
        self.tensors.open_in(self._folder)

    def end_step(self, step: int) -> None:
        """Note on disk that the step is complete: in a killed run, what comes after it is not."""
        self.flush()
        self._ended = step
        if self._lock is None:
            return
        try:
            write_part(self._run, self._open_part(), lock=self._lock)
        except OSError as error:
            self._count(f"rank{self._rank}.json", error)
            let_through(error)

    def _open_part(self) -> RankPart:
        return RankPart(self._rank, self._trainer_pid, socket.gethostname(), ended=self._ended)

    def call(self, event: Event, stored: list[Stored | None]) -> None:
        """Add the line of a call."""
        for slot, kept in zip(event.slots, stored, strict=True):
            _complete(slot, kept)
        self.add_lines(self._encoder.encode(event), 1)

    def add_lines(self, lines: bytes, calls: int) -> None:
        """Add the lines of some calls, separated by line ends, whose bytes are in `tensors`."""
        self._lines.append(lines)
        self._calls_waiting += calls
        if self._calls_waiting >= _FLUSH_LINES or self.tensors.size_bytes - self._flushed_at >= _FLUSH_BYTES:
            self.flush()

    def stack(self, note: StackNote) -> None:
        """Add a stack, with the source lines as they are on disk now."""
        frames = with_source(note)
        try:
            if self._stacks_fd == -1:
                self._stacks_fd = _create(self._folder / "stacks.jsonl")
            write_all(self._stacks_fd, self._encoder.encode({"id": note.id, "frames": frames}) + b"\n")
        except OSError as error:
            self._count("stacks.jsonl", error)
            let_through(error)

    def flush(self) -> None:
        """Write tensors, then the lines that name them."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        calls, self._calls_waiting = self._calls_waiting, 0
        self.tensors.flush()
        self._flushed_at = self.tensors.size_bytes
        if self.tensors.broken:
            lines = [self._without_lost_data(line) for line in b"\n".join(lines).split(b"\n")]
        try:
            if self._calls_fd == -1:
                self._open_calls()
            data = b"\n".join(lines) + b"\n"
            write_all(self._calls_fd, data)
            self._calls_size += len(data)
            self._calls_in_file += calls
        except OSError as error:
            self._count("calls.jsonl", error)
            self._lost_calls += calls
            self._cut_torn_line()
            let_through(error)

    def finish(self, closing: CloseNote | None, trainer_pid: int) -> RankPart | None:
        """Write everything out; with a closing message also the rank's part, which says that the run is whole."""
        self._close_step()
        part = None if closing is None else self._write_closed(closing, trainer_pid)
        self._place.close()
        if self._lock is not None:
            self._lock.close()
        return part

    def _write_closed(self, closing: CloseNote, trainer_pid: int) -> RankPart:
        self._look_again()
        failures = self.tensors.failures + self._failures
        notes = []
        if self.tensors.over_limit:
            notes.append(
                f"max_bytes reached after {self.tensors.total_bytes:,} bytes: later tensors have summaries only"
            )
        folder = f"the folder {str(self._place.first)!r}"
        moved_to: str | msgspec.UnsetType = msgspec.UNSET
        if self._place.is_deleted():
            failures = Counter({f"{folder} was deleted during the run": 1}) + failures
        elif (moved_to := self._place.moved_to()) is not msgspec.UNSET:
            notes.append(f"{folder} was moved during the run, and is now {moved_to!r}")
        written = Written(self.tensors.total_bytes, self._lost_calls, failures, notes, moved_to=moved_to)
        part = self._closed_part(trainer_pid, closing, written)
        try:
            write_part(self._run, part)
        except OSError as error:
            self._count(f"rank{self._rank}.json", error)
            let_through(error)
            written = written._replace(failures=failures + self._failures)
            part = self._closed_part(trainer_pid, closing, written)
        return part

    def _closed_part(self, trainer_pid: int, closing: CloseNote, written: Written) -> RankPart:
        part = closed_part(self._rank, trainer_pid, closing, written)
        return msgspec.structs.replace(part, steps=list(self._steps), ended=self._ended)

    def _open_calls(self) -> None:
        self._calls_fd = _create(self._folder / "calls.jsonl")
        self._calls_size = self._calls_in_file = 0

    def _without_lost_data(self, line: bytes) -> bytes:
        """Return the line without offsets that never reached the file: a full disk must not leave false ones."""
        call = msgspec.json.decode(line)
        for slot in call.get("slots", ()):
            if slot.get("offset", 0) + slot.get("nbytes", 0) > self.tensors.confirmed:
                slot.pop("offset", None)
        return self._encoder.encode(call)

    def _cut_torn_line(self) -> None:
        if self._calls_fd != -1:
            try:
                os.ftruncate(self._calls_fd, self._calls_size)
                os.lseek(self._calls_fd, self._calls_size, os.SEEK_SET)
            except OSError as error:
                self._count("calls.jsonl", error)
                let_through(error)

    def _close_step(self) -> None:
        self.flush()
        self.tensors.close()
        if self._calls_fd != -1:
            sizes = {"calls.jsonl": self._calls_size}
            if self.tensors.closed_bytes is not None:
                sizes["tensors.bin"] = self.tensors.closed_bytes
            if self._stacks_fd != -1:
                sizes["stacks.jsonl"] = os.fstat(self._stacks_fd).st_size
            self._steps[self._step] = Closed(self._folder, self._calls_in_file, sizes)
        for fd in (self._calls_fd, self._stacks_fd):
            if fd != -1:
                os.close(fd)
        self._calls_fd = self._stacks_fd = -1
        self._flushed_at = 0

    def _look_again(self) -> None:
        """Count the files that are no longer on disk as they were written."""
        if not (self._run / "manifest.json").exists():
            self._failures["manifest.json: was deleted during the run"] += 1
        for step, closed in list(self._steps.items()):
            for name, size in closed.sizes.items():
                try:
                    found = (closed.folder / name).stat().st_size
                except OSError as error:
                    let_through(error)
                    found = None
                if found == size:
                    continue
                self._failures[f"{name}: was {'deleted' if found is None else 'changed'} during the run"] += 1
                if name == "calls.jsonl":
                    self._lost_calls += closed.calls
                    del self._steps[step]

    def _count(self, file: str, error: OSError) -> None:
        self._failures[f"{file}: {error.strerror or error}"] += 1


class Written(NamedTuple):
    """What a recorder knows at the end: bytes of values on disk, calls that could not be written, disk failures, notes."""

    size_bytes: int
    lost_calls: int
    failures: Counter[str]
    notes: list[str]
    left_out: int = 0
    """Calls for which the layout has no name or no line."""
    moved_to: str | msgspec.UnsetType = msgspec.UNSET


def closed_part(rank: int, trainer_pid: int, closing: CloseNote, written: Written) -> RankPart:
    """Return the part of a rank that ended normally: what the trainer counted, corrected by what reached the disk."""
    coverage = msgspec.convert(closing.coverage, Coverage)
    failures = [f"{what} ({count} times)" for what, count in written.failures.items()]
    coverage = msgspec.structs.replace(
        coverage,
        recorded=coverage.recorded - written.lost_calls - written.left_out,
        filtered=coverage.filtered + written.left_out,
        failed=coverage.failed + written.lost_calls,
        bytes_written=written.size_bytes,
        notes=[*coverage.notes, *failures, *written.notes],
        first_error=coverage.first_error or next(iter(written.failures), None),
        moved_to=written.moved_to,
    )
    return RankPart(
        rank=rank,
        pid=trainer_pid,
        host=socket.gethostname(),
        device=closing.device,
        coordinates=closing.coordinates,
        closed=True,
        coverage=coverage,
        raised=closing.raised,
    )


def with_source(note: StackNote) -> list[tuple[str, int, str, str]]:
    """Return the frames of a stack, each with its source line as it is on disk now."""
    return [
        (file, line, function, note.cells.get(at) or linecache.getline(file, line).strip())
        for at, (file, line, function) in enumerate(note.frames)
    ]


def write_part(run: Path, part: RankPart, *, lock: OwnFile | None = None) -> None:
    """Put a rank's part in place, whole or not at all. `lock`, the part before it, becomes the new one, locked as it was."""
    new = -1
    try:
        with Replacement(run / f"rank{part.rank}.json") as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(part), indent=1) + b"\n")
            if lock is not None:
                new = os.open(unfinished, os.O_RDONLY)
                hold(new)
        if lock is not None:
            lock.become(new)  # only now: the part that a reader sees is locked all the time
    except BaseException:
        if new != -1:
            os.close(new)
        raise


def hold(fd: int) -> bool:
    """Lock an open file. Return whether no other process holds it; True also where the file system has no locks."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:
        let_through(error)
        return True
    return True


def _complete(slot: SlotEvent, stored: Stored | None) -> None:
    """Fill in what is known of a tensor once its bytes have been read."""
    slot.token = NO_TOKEN
    if stored is not None:
        slot.summary = json_summary(stored.moments)
        slot.digest, slot.nbytes, slot.offset = stored.digest, stored.nbytes, stored.offset
    elif slot.summary is not None:
        slot.summary = json_summary(Moments._make(slot.summary))


def _create(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes, in as many writes as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

"""From the recording of a running program to the JSON files of api_accuracy_checker, however the program ends.

A program is recorded as a run of ours, in a hidden folder beside the files to be. When the recording ends, the files are
written from it and the folder goes. A guard, a small process without torch, does that for a program that is killed: it
sleeps until its program says that it took care itself, or is gone. When the guard is killed too, the folder stays, and
`finish_recording` can be called on it at any later time. Whoever does it holds a lock on the folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tensorprobe.errors import RunError
from tensorprobe.legacy.layouts.checker_reader import UNFINISHED
from tensorprobe.legacy.layouts.checker_writer import Written, write_checker
from tensorprobe.record.draining import trainer_is_alive

_LOOK_S = 1.0


def recording_folder(folder: Path, pid: int) -> Path:
    """Where process `pid` records whose files go into `folder`."""
    return folder / f"{UNFINISHED}{pid}"


def find_unfinished(file: Path) -> Path | None:
    """The recording from which a lacking `forward_info_{pid}.json` can be written, if there is one."""
    tag = file.name.partition("_info_")[2].removesuffix(".json")
    recording = file.parent / f"{UNFINISHED}{tag}"
    return recording if tag.isdecimal() and recording.is_dir() and not file.exists() else None


def finish_recording(recording: Path, *, has_ended: bool = False) -> Written | None:
    """Write the files of a recording that has ended, and remove it; None when somebody else has done so meanwhile.

    Without `has_ended` a RunError tells that the program still runs; with it, what its recorder still has to write is
    waited for. RunError too when the recording cannot be read; it stays then.
    """
    from tensorprobe.record.reader import open_run  # which knows all layouts, this one too

    with _locked(recording) as held:
        if not held:
            return None
        if _is_recorded(recording, wait=has_ended) and any(map(trainer_is_alive, open_run(recording).parts.values())):
            raise RunError(f"'{recording}' is still being recorded; its files are written when that ends.")
        run = open_run(recording)
        tag = recording.name.removeprefix(UNFINISHED)
        written = write_checker(run, recording.parent, tag, real=run.manifest.settings.get("mode") == "tensor")
        shutil.rmtree(recording)
    return written


def _is_recorded(recording: Path, *, wait: bool) -> bool:
    """Whether a recorder is at work there, which holds a lock on its part; or wait until none is.

    The process itself cannot be asked: one that is dead and not yet buried looks alive.
    """
    for part in recording.glob("rank*.json"):
        descriptor = os.open(part, os.O_RDONLY)
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return True
        except (ImportError, OSError):
            return not wait  # without locks the process is asked after all
        finally:
            os.close(descriptor)
    return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the folder is there, and ours alone until the end."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # without locks there is no guard to be kept apart from
        yield folder.exists()
    finally:
        os.close(descriptor)


class Guard:
    """Writes the files of a recording when this process dies without having done so."""

    def __init__(self, recording: Path) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from tensorprobe.legacy.layouts.checker_recording import guard; guard({str(recording)!r}, {os.getpid()})"
        )
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what is sent to the program's group must not end its guard
            )
        except OSError:
            self._process = None  # the recording then waits for whoever asks for its files

    def dismiss(self) -> None:
        """The files are written, or are to be left alone."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                self._process.communicate(b"done")
            self._process = None


def guard(recording: str, program: int) -> None:
    """Entry of the guard's process."""
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready:
            if os.read(0, 16):
                return
            break
        # Forked workers of a dead program may hold its end of the pipe open.
        if os.getppid() != program:
            break
    finish_recording(Path(recording), has_ended=True)

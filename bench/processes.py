"""Runs one command as a process of its own and tells what it took; and puts files into the page cache or out of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.driver import environment

_CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 512
"""The unit in which the kernel counts what a process read from the disk."""


@dataclass(frozen=True)
class Finished:
    """A process that ended. CPU and disk reads count its own children too; peak memory is that of the largest process."""

    exit_code: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    disk_read_bytes: int
    stdout: str
    stderr: str


def run_process(command: list[str], folder: Path, time_limit: float) -> Finished:
    """Runs the command to its end with `folder` for its outputs; after `time_limit` seconds its session is ended."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            start_new_session=True,
            env=environment(),
        )
        limit = threading.Timer(time_limit, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
            wall = time.perf_counter() - start
        finally:
            limit.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)  # it is reaped already: Popen must not wait again
    return Finished(
        exit_code=process.returncode,
        wall_s=wall,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,
        disk_read_bytes=used.ru_inblock * _BLOCK_BYTES,
        stdout=out.read_text(errors="replace"),
        stderr=err.read_text(errors="replace"),
    )


def warm_pages(folder: Path) -> None:
    """Reads every file of the folder, so that its pages are in memory."""
    buffer = bytearray(_CHUNK_BYTES)
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_pages(folder: Path) -> None:
    """Makes the kernel forget the pages of every file of the folder; the next reader gets them from the disk."""
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not on the disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]

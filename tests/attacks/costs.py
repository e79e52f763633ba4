"""Run a command on a hostile file and measure what it costs: seconds, memory, exit code and output."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tensorprobe.cli.main import app
from tensorprobe.report.ending import ended
from tests import warm

MOST_S = 10.0
"""Seconds of processor time, with all processes that the command started: other programs on the machine do not count."""
MOST_BYTES = 1 << 30
_MOST_PRINTED = 100_000
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")


class Cost(NamedTuple):
    """What one command did and needed."""

    code: int
    out: str
    err: str
    cpu_s: float
    peak_bytes: int

    def problems(self, *codes: int) -> list[str]:
        """Return every promise that the command did not keep; `codes` are the exit codes that are right."""
        said = self.out + self.err
        found = []
        if self.code not in codes:
            found.append(f"exit code {self.code}, not {' or '.join(map(str, codes))}")
        if "Traceback" in said or "bug of tensorprobe" in said:
            found.append("a traceback")
        if self.cpu_s > MOST_S:
            found.append(f"{self.cpu_s:.1f} s")
        if self.peak_bytes > MOST_BYTES:
            found.append(f"{self.peak_bytes / 1e6:,.0f} MB")
        if len(said) > _MOST_PRINTED:
            found.append(f"{len(said):,} characters printed")
        if _UNPRINTABLE.search(said):
            found.append(f"control characters printed: {_UNPRINTABLE.findall(said)[:5]!r}")
        if self.code == 2 and not re.match(r"[A-Z]\w+: ", self.err) and not self.out:
            found.append("exit code 2 without an error")
        return found


def run(*command: object, timeout_s: float = 6 * MOST_S, **settings: Any) -> Cost:
    """Run `tensorprobe` with these arguments, in a process that begins with torch in memory."""
    return run_program(
        [sys.executable, "-m", "tensorprobe", *map(os.fspath, map(_word, command))], timeout_s, **settings
    )


def run_here(*command: object) -> Cost:
    """Run `tensorprobe` with these arguments in this process, which takes milliseconds. Its memory is not measured."""
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with pytest.MonkeyPatch.context() as patches, redirect_stdout(out), redirect_stderr(err):
        patches.setattr(sys, "argv", ["tensorprobe", *map(os.fspath, map(_word, command))])
        try:
            code = ended(app)
        except SystemExit as end:
            code = int(end.code or 0)
    return Cost(code, out.getvalue(), err.getvalue(), time.process_time() - began, 0)


def run_program(words: list[str], timeout_s: float = 6 * MOST_S, **settings: Any) -> Cost:
    """Run a program to its end, or kill it after `timeout_s`."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with warm.Popen(words, **pipes, **settings) as process, ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(stream.read) for stream in (process.stdout, process.stderr)]
        timer = threading.Timer(timeout_s, os.kill, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out, err = (text.result().decode(errors="backslashreplace") for text in texts)
    return Cost(process.returncode, out, err, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def _word(argument: object) -> str | Path:
    return argument if isinstance(argument, Path) else str(argument)

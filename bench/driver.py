"""What the drivers of the benchmarks share: worker processes, rounds, options, the published peer, the machine, the report.

Every measurement is a process of its own. A worker is a module of this package, run with `-m`; it prints its result as
one JSON line, the last of its stdout. Never imports torch: the peak memory the kernel reports for a process is never
less than that of the process that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
INSTALL_LIMIT_S = 1800
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A process to run: a module of this package with arguments. `about` says what it measures."""

    module: str
    about: Row
    arguments: tuple[str, ...]
    python: str = sys.executable
    needs_folder: bool = False
    """Whether it takes `--work`: an empty folder, removed afterwards."""


def environment(**more: str) -> dict[str, str]:
    """The environment of a worker, which finds this package wherever it starts."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def run_task(task: Task, options: argparse.Namespace, folder: Path) -> Row:
    """What the worker measured, or `{"error": …}`. Leaves no process and no file behind."""
    work = Path(tempfile.mkdtemp(dir=folder))
    threads = str(options.threads)
    command = [task.python, "-m", task.module, *task.arguments, "--threads", threads]
    # A session of its own, so that a worker that hangs is ended together with the processes it started.
    worker = subprocess.Popen(
        [*command, "--work", str(work)] if task.needs_folder else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads),
        start_new_session=True,
    )
    try:
        stdout, stderr = worker.communicate(timeout=options.time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.communicate()
        return {"error": f"not done in {options.time_limit} s"}
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.sync()
    if worker.returncode:
        return {"error": f"exit {worker.returncode}: " + "".join(stderr.splitlines()[-1:])}
    result: Row = json.loads(stdout.splitlines()[-1])
    return result


def run_rounds(tasks: Sequence[Task], options: argparse.Namespace, folder: Path, repeats: int) -> list[Row]:
    """For each task what it measured, once for each round. The tasks take turns."""
    rounds: list[list[Row]] = [[] for _ in tasks]
    for number in range(repeats):
        for task, results in zip(tasks, rounds, strict=True):
            say_round(number, repeats, " ".join(str(value) for value in task.about.values() if value != ""))
            results.append(run_task(task, options, folder))
            say_failure(results[-1])
    return [{**task.about, "rounds": results} for task, results in zip(tasks, rounds, strict=True)]


def say_round(number: int, repeats: int, label: str) -> None:
    print(f"round {number + 1} of {repeats}: {label}", file=sys.stderr, flush=True)


def say_failure(result: Row) -> None:
    if "error" in result:
        print(f"  failed: {result['error']}", file=sys.stderr, flush=True)


def has_failed(row: Row) -> bool:
    """Whether a row, or one of its rounds, is a measurement that failed."""
    return bool(row.get("error")) or any("error" in result for result in row.get("rounds", ()))


def run_parts(
    options: argparse.Namespace,
    measure: Callable[[str, argparse.Namespace, Path], list[Row]],
    print_tables: Callable[[dict[str, list[Row]]], None],
) -> int:
    """Measure the parts of a benchmark. Parts that were not asked for stay in the report as they were."""
    report = json.loads(options.output.read_text()) if options.output.exists() else {}
    measured = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        for part in options.parts:
            measured[part] = measure(part, options, Path(work))
            report[part] = {"machine": describe_machine(), "threads": options.threads, "rows": measured[part]}
            write_report(options.output, report)
    print_tables(measured)
    print(f"Written to {options.output}")
    return int(any(has_failed(row) for rows in measured.values() for row in rows))


def write_report(path: Path, report: Row) -> None:
    """Write the raw results as standard JSON; an infinity is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


def prepare_peer() -> str | None:
    """Install the peer; return why that was not possible."""
    try:
        setup = subprocess.run(
            ["sh", str(ROOT / "bench" / "peer" / "setup.sh")],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not installed in {INSTALL_LIMIT_S} s"
    return None if setup.returncode == 0 else "".join(setup.stderr.splitlines()[-1:]) or f"exit {setup.returncode}"


def without_peer(options: argparse.Namespace) -> None:
    """Install the peer if it is wanted; where that fails, say so and go on without it."""
    if options.peer and (reason := prepare_peer()):
        print(f"The peer cannot be installed ({reason}). Going on without it, as with --no-peer.", file=sys.stderr)
        options.peer = False


def words_of(pattern: str) -> Callable[[str], list[str]]:
    """A reader of words with commas between, each of which must match `pattern`."""

    def words(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        for word in found:
            if not re.fullmatch(pattern, word):
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {pattern}")
        return found

    return words


def describe_machine() -> Row:
    """What the figures depend on."""
    from tensorprobe.numerics import native

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_at_start": os.getloadavg()[0],
        "tensorprobe": VERSION,
        "arithmetic": native.describe(),
    }

"""Side by side: a training step plain, under tensorprobe and under the published peer.

Every measurement is a process of its own (ours.py, peer/run.py; the rules are in protocol.py); the processes of all
tools take turns, and the whole round is repeated. Prints tables and writes `bench/results/capture.json`. Exits with 1
when a measurement failed. A missed target is a result, not a failure.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture_table import print_tables

HERE = Path(__file__).resolve().parent
PEER_PYTHON = HERE.parent / ".venv-peer" / "bin" / "python"
PEER_LEVELS = {"module": "L0", "api": "L1", "mix": "mix"}
WORKLOADS = ["gpt-tiny", "gpt-tiny-fb", "resnet-small", "gpt-medium", "gpt-medium-fb"]
STEPS = {"tiny": 5, "small": 3, "medium": 2}
INSTALL_LIMIT_S = 1800


@dataclass(frozen=True)
class Task:
    """One process to run: a tool on a workload. `mode` digest is the peer's md5 beside our summary (it has digests)."""

    workload: str
    tool: str
    mode: str = ""
    level: str = ""

    def command(self, options: argparse.Namespace, work: Path) -> list[str]:
        steps = STEPS[self.workload.split("-")[1]]
        shared = ["--workload", self.workload, "--steps", str(steps), "--threads", str(options.threads)]
        shared += ["--work", str(work)]
        if self.tool == "peer":
            worker = [str(PEER_PYTHON), str(HERE / "peer" / "run.py")]
            return [*worker, *shared, "--mode", self.mode, "--level", PEER_LEVELS[self.level]]
        worker = [sys.executable, str(HERE / "ours.py")]
        if self.tool == "plain":
            return [*worker, *shared, "--mode", "plain"]
        mode = "summary" if self.mode == "digest" else self.mode
        return [*worker, *shared, "--mode", mode, "--level", self.level]


def list_tasks(options: argparse.Namespace) -> Iterator[Task]:
    """The tasks of one round, in the order in which they run."""
    for workload in options.workloads:
        yield Task(workload, "plain")
        for mode in options.modes:
            for level in options.levels:
                yield Task(workload, "tensorprobe", mode, level)
                if options.peer and level in PEER_LEVELS:
                    yield Task(workload, "peer", mode, level)


def run_task(task: Task, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the worker measured, or `{"error": …}`. Leaves no process and no file behind."""
    work = Path(tempfile.mkdtemp(prefix=f"{task.tool}-", dir=folder))
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    # A session of its own, so that a worker that hangs is ended together with the processes it started.
    worker = subprocess.Popen(
        task.command(options, work),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
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
    result: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return result


def prepare_peer() -> str | None:
    """Installs the peer; returns why that was not possible."""
    try:
        setup = subprocess.run(
            ["sh", str(HERE / "peer" / "setup.sh")],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not installed in {INSTALL_LIMIT_S} s"
    return None if setup.returncode == 0 else "".join(setup.stderr.splitlines()[-1:]) or f"exit {setup.returncode}"


def run_rounds(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """For each task its results, one for each round."""
    measured: dict[Task, list[dict[str, Any]]] = {task: [] for task in list_tasks(options)}
    for number in range(options.repeats):
        for task in measured:
            label = " ".join(part for part in (task.workload, task.tool, task.mode, task.level) if part)
            print(f"round {number + 1} of {options.repeats}: {label}", file=sys.stderr, flush=True)
            result = run_task(task, options, folder)
            if "error" in result:
                print(f"  failed: {result['error']}", file=sys.stderr, flush=True)
            measured[task].append(result)
    return [{**vars(task), "rounds": rounds} for task, rounds in measured.items()]


def words_of(pattern: str) -> Callable[[str], list[str]]:
    """A reader of words with commas between, each of which must match `pattern`."""

    def words(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        for word in found:
            if not re.fullmatch(pattern, word):
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {pattern}")
        return found

    return words


def parse_options() -> argparse.Namespace:
    workloads, modes = words_of("(gpt|resnet)-(tiny|small|medium)(-fb)?"), words_of("tensor|summary|digest")
    levels = words_of("module|api|mix|aten")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=workloads, default=WORKLOADS, help="commas between; -fb: no optimizer step")
    parser.add_argument("--modes", type=modes, default=["tensor", "summary"], help="tensor, summary, digest")
    parser.add_argument("--levels", type=levels, default=["api"], help="module, api, mix, aten (the peer has no aten)")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave the published peer out")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--quick", action="store_true", help="one round of three workloads")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one process")
    parser.add_argument("--work", type=Path, default=HERE / "results", help="where the records go, for a while")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "capture.json")
    options = parser.parse_args()
    if options.quick:
        options.repeats = 1
        if options.workloads is WORKLOADS:
            options.workloads = ["gpt-tiny", "resnet-small", "gpt-medium"]
    return options


def main() -> int:
    options = parse_options()
    if options.peer and (reason := prepare_peer()):
        print(f"The peer cannot be installed ({reason}). Going on without it, as with --no-peer.", file=sys.stderr)
        options.peer = False
    options.work.mkdir(parents=True, exist_ok=True)
    # Only a folder of our own making is removed afterwards: --work may name one that holds other things.
    with tempfile.TemporaryDirectory(prefix="capture-", dir=options.work) as own:
        cases = run_rounds(options, Path(own))
    machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "threads": options.threads, "repeats": options.repeats, "cases": cases}
    options.output.write_text(json.dumps(report, indent=1))
    print_tables(cases)
    print(f"Written to {options.output}")
    return int(any("error" in result for case in cases for result in case["rounds"]))


if __name__ == "__main__":
    sys.exit(main())

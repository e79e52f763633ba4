"""Every target beside its figure: `make bench` in 15 minutes, `make bench-quick` in 3.

Runs the benchmarks of the parts below one after the other, each for a limited time, and prints one table: what, target,
measured, reached, command. A part that fails or has no time left is a line of its own, never left out. Writes
`bench/results/bench.json` and, as Markdown, `bench/results/bench.md`. Figures hold for an idle machine: the load at the
start is printed. Exits with 1 when a part was not measured. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.capture import table as capture
from bench.compare import table as compare
from bench.compare.opening import list_targets as opening_targets
from bench.driver import RESULTS, describe_machine, environment, write_report
from bench.instructions import list_targets as instruction_targets
from bench.online import table as online
from bench.overflow import table as overflow

LIMITS_S = {"all": 870.0, "quick": 170.0}
"""Of the whole, in seconds: 15 and 3 minutes, less what starting and printing take."""
Line = Sequence[Any]
"""What, target, measured, and whether it is reached: a bool, or a word that says more."""


@dataclass(frozen=True)
class Part:
    """One benchmark: its module and arguments, how long it may take, and how its report becomes lines."""

    module: str
    arguments: str
    seconds: float
    read: Callable[[dict[str, Any]], Iterable[Line]]

    @property
    def command(self) -> str:
        """What to type to run it alone."""
        return f"python -m {self.module} {self.arguments}".strip()


def _capture(report: dict[str, Any]) -> Iterable[Line]:
    return capture.list_targets(report["cases"])


def _compare(report: dict[str, Any]) -> Iterable[Line]:
    return compare.list_targets(report["cases"])


def _online(report: dict[str, Any]) -> Iterable[Line]:
    return online.overhead(report["overhead"]["rows"])[1]


def _overflow(report: dict[str, Any]) -> Iterable[Line]:
    return overflow.overhead(report["overhead"]["rows"])[1]


PARTS = {
    "all": (
        Part("bench.compare.opening", "--keep", 40, opening_targets),
        Part("bench.compare", "--sizes small,summary --variants noisy,proved --repeats 2 --no-peer", 100, _compare),
        Part("bench.compare", "--sizes large --variants noisy,cold,proved --repeats 1 --msprobe", 270, _compare),
        Part("bench.capture", "--workloads gpt-tiny,resnet-small,gpt-medium --repeats 1 --msprobe", 320, _capture),
        Part("bench.online", "--parts overhead --sizes small --devices cpu --repeats 1", 80, _online),
        Part("bench.overflow", "--parts overhead --repeats 1", 40, _overflow),
        Part("bench.instructions", "--workload gpt-tiny", 60, instruction_targets),
    ),
    "quick": (
        Part("bench.compare.opening", "--keep", 40, opening_targets),
        Part("bench.compare", "--sizes small,summary --variants noisy --threads 2 --repeats 1 --no-peer", 60, _compare),
        Part("bench.capture", "--workloads gpt-tiny,resnet-small --repeats 1 --no-peer", 70, _capture),
        Part("bench.overflow", "--parts overhead --sizes tiny --repeats 1", 30, _overflow),
    ),
}  # fmt: skip


def run_part(part: Part, report: Path, limit_s: float) -> str:
    """Run a benchmark that writes `report`; return why it was not measured whole, or nothing."""
    report.unlink(missing_ok=True)
    if limit_s < 1:
        return "no time was left"
    command = [sys.executable, "-m", part.module, *part.arguments.split(), "--output", str(report)]
    log = report.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done in {limit_s:.0f} s"
    return "" if code == 0 else f"exit {code}; see {log}"


def lines_of(part: Part, report: Path, problem: str) -> list[dict[str, str]]:
    """Return the lines of a part: its targets as far as they were measured, and what went wrong."""
    about = {"command": part.command}
    try:
        found = list(part.read(json.loads(report.read_bytes())))
    except (OSError, ValueError, LookupError) as error:
        found, problem = [], problem or f"its report cannot be read: {type(error).__name__}: {error}"
    verdicts = {True: "yes", False: "NO"}
    lines = [
        {"what": what, "target": target, "measured": measured, "reached": verdicts.get(reached, str(reached)), **about}
        for what, target, measured, reached in found
    ]
    if problem or not lines:
        said = problem or "it printed no target"
        lines.append({"what": part.module, "target": "", "measured": f"not measured: {said}", "reached": "NO", **about})
    return lines


def as_markdown(machine: dict[str, Any], lines: list[dict[str, str]]) -> str:
    """Return the table as Markdown, with the state of the machine above it."""
    cores, load = machine["cores"], machine["load_at_start"]
    head = f"{machine['processor']}, {cores} cores, load at the start {load:.1f}"
    names = ("what", "target", "measured", "reached", "command")
    rows = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    rows += ["| " + " | ".join(line[name].replace("|", "\\|") for name in names) + " |" for line in lines]
    return "\n".join([head, "", *rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer parts, in 3 minutes")
    parser.add_argument("--work", type=Path, default=RESULTS, help="where reports and logs go")
    options = parser.parse_args()
    kind = "quick" if options.quick else "all"
    options.work.mkdir(parents=True, exist_ok=True)
    machine, end = describe_machine(), time.monotonic() + LIMITS_S[kind]
    lines: list[dict[str, str]] = []
    failed = False
    for number, part in enumerate(PARTS[kind]):
        print(part.command, file=sys.stderr, flush=True)
        report = options.work / f"{kind}-{number}.json"
        problem = run_part(part, report, min(part.seconds, end - time.monotonic()))
        failed |= bool(problem)
        lines += lines_of(part, report, problem)
    table = as_markdown(machine, lines)
    write_report(options.work / "bench.json", {"machine": machine, "lines": lines})
    (options.work / "bench.md").write_text(table, encoding="utf-8")
    print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

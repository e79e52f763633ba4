"""Side by side: comparing two runs with tensorprobe and with the published peer, on the same tensors.

With `--msprobe` also with our program of the peer's name, on the peer's own dumps.
Every measurement is a whole process, from its start to its exit code; the processes of all tools take turns. Sizes and
their tensors are in plan.py, the dumps are made by data.py. Variants: `noisy` (every tensor differs, one
fault is planted, files in the page cache), `cold` (the same from disk), `identical` (no tensor differs, so that equal
digests may save the reading), `proved` (as `noisy`, with the replays that prove the answer; the others are with
`--prove off`, as the peer proves nothing). Checks that our answer names the planted call, and that a table of
msprobe has its rows and shows the planted error.
Prints tables and writes `bench/results/compare.json`. Exits with 1 when a measurement failed or an answer is wrong. A
missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare.plan import SIZES, VARIANTS, Dumps, Size, describe_dumps
from bench.compare.table import print_tables
from bench.driver import (
    PEER_PYTHON,
    RESULTS,
    describe_machine,
    environment,
    has_failed,
    say_failure,
    say_round,
    without_peer,
    words_of,
    write_report,
)
from bench.processes import Finished, drop_pages, run_process, warm_pages

OURS = Path(sys.executable).with_name("tensorprobe")
MSPROBE = {"peer": [str(PEER_PYTHON.with_name("msprobe"))], "msprobe": [sys.executable, "-m", "msprobe"]}
"""The programs of that name: the published one, and ours."""
PEER_ONCE = ("cold", "identical")
"""Variants that the peer runs in the first round only: it needs ten times as long as all of ours together."""
FAULT = 0.01
"""The planted error is far above this, the noise everywhere else far below."""
OURS_EACH = 2
"""How often ours runs for each run of the peer beside it: it is short, and its figures scatter more."""


@dataclass(frozen=True)
class Task:
    """One process to run. `threads` 0: the tool has no such option. `size` help is `--help`, without any dump."""

    size: str
    variant: str
    tool: str
    threads: int = 0

    def command(self, dumps: Dumps | None, output: Path) -> list[str]:
        if dumps is None:
            return [*MSPROBE.get(self.tool, [str(OURS)]), "--help"]
        identical = self.variant == "identical"
        if self.tool in MSPROBE:
            target, golden = dumps.peer("baseline" if identical else "candidate"), dumps.peer("baseline")
            paths = ["-tp", str(target / "dump.json"), "-gp", str(golden / "dump.json")]
            return [*MSPROBE[self.tool], "compare", *paths, "-o", str(output)]
        baseline, candidate = dumps.ours("baseline"), dumps.ours("same" if identical else "candidate")
        command = [str(OURS), "compare", str(baseline), str(candidate), "-o", str(output)]
        return [
            *command,
            "--policy",
            "noise-aware",
            "--threads",
            str(self.threads),
            "--jobs",
            "1",
            "--format",
            "text",
            "--prove",
            "auto" if self.variant == "proved" else "off",
        ]


def list_tasks(size: Size, options: argparse.Namespace, number: int) -> Iterator[Task]:
    """The tasks of one round of a size, in the order in which they run."""
    for variant in (name for name in size.variants if name in options.variants):
        if options.peer and size.peer and variant != "proved" and (number == 0 or variant not in PEER_ONCE):
            yield Task(size.name, variant, "peer")
        if options.msprobe and size.peer and variant != "proved":
            yield from [Task(size.name, variant, "msprobe")] * OURS_EACH
        for _ in range(OURS_EACH if size.peer else 1):
            for threads in options.threads:
                yield Task(size.name, variant, "tensorprobe", threads)


def run_task(task: Task, dumps: Dumps | None, options: argparse.Namespace) -> dict[str, Any]:
    """What the process took, or `{"error": …}`."""
    with tempfile.TemporaryDirectory(prefix="compare-", dir=options.work) as own:
        output = Path(own) / "output"
        if dumps is not None:
            prepare = drop_pages if task.variant == "cold" else warm_pages
            prepare(dumps.folder / ("peer" if task.tool in MSPROBE else "ours"))
        done = run_process(task.command(dumps, output), Path(own), options.time_limit)
        check = check_table if task.tool in MSPROBE else check_ours
        problem = _check_help(done) if dumps is None else check(task, dumps, done, output)
    if problem:
        return {"error": problem}
    figures = dataclasses.asdict(done)
    return {key: figures[key] for key in ("wall_s", "cpu_s", "peak_bytes", "disk_read_bytes")}


def _check_help(done: Finished) -> str | None:
    return None if done.exit_code == 0 and "compare" in done.stdout else _failure(done)


def check_ours(task: Task, dumps: Dumps, done: Finished, output: Path) -> str | None:
    """What is wrong with our answer: it names the planted call, or nothing for identical runs, and has all rows."""
    expected, named = (0, None) if task.variant == "identical" else (1, dumps.planted)
    if done.exit_code != expected:
        return _failure(done)
    try:
        answer = json.loads((output / "summary.json").read_bytes())
        divergence, rows = answer["divergence"], answer["rows"]
        found = divergence["call"] if divergence else None
    except (OSError, ValueError, LookupError, TypeError) as problem:
        return f"summary.json cannot be read: {type(problem).__name__}: {problem}"
    if found != named:
        return f"names {found} instead of {named}"
    return None if rows == dumps.slots else f"{rows} rows instead of {dumps.slots}"


def check_table(task: Task, dumps: Dumps, done: Finished, output: Path) -> str | None:
    """What is wrong with a table of msprobe: it has a row for each tensor (and some more, for scalars), and the planted error."""
    tables = sorted(output.glob("compare_result*.csv")) if output.is_dir() else []
    if done.exit_code not in ((0,) if task.tool == "peer" else (0, 1)) or not tables:
        return _failure(done)
    with tables[-1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) < dumps.slots:
        return f"{len(rows)} rows for {dumps.slots} tensors"
    row = next((row for row in rows if row["NPU Name"] == f"{dumps.planted}.output.0"), {})
    error = abs(float(row.get("MaxAbsErr") or row.get("Max diff") or "nan"))
    is_right = error == 0 if task.variant == "identical" else error > FAULT
    return None if is_right else f"{dumps.planted}.output.0 has an error of {error}"


def _failure(done: Finished) -> str:
    """The exit code and the line that says why: the last one that names an error, or else the last one with words."""
    lines = [line.strip(" │|") for line in (done.stdout + done.stderr).splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f"exit {done.exit_code}: {''.join((errors or lines)[-1:])}"


def run_rounds(size: Size | None, dumps: Dumps | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each task of a size its results in all rounds; without a size, those of `--help`."""
    measured: dict[Task, list[dict[str, Any]]] = {}
    for number in range(options.repeats):
        tools = [tool for tool in MSPROBE if getattr(options, tool)]
        tasks = (
            list_tasks(size, options, number) if size else (Task("help", "", tool) for tool in [*tools, "tensorprobe"])
        )
        for task in tasks:
            label = f"{task.size} {task.variant} {task.tool}" + (f" {task.threads} threads" if task.threads else "")
            say_round(number, options.repeats, label)
            result = run_task(task, dumps, options)
            say_failure(result)
            measured.setdefault(task, []).append({"round": number, **result})
    about = {"calls": dumps.calls, "slots": dumps.slots, "pair_bytes": 2 * dumps.nbytes} if dumps else {}
    return [{**vars(task), **about, "rounds": rounds} for task, rounds in measured.items()]


def run_size(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Makes the dumps of a size, measures, and removes them again."""
    size = SIZES[name]
    wanted = options.peer or options.msprobe
    if not wanted or options.whole:
        size = dataclasses.replace(size, peer=wanted)
    print(f"{name}: making the dumps", file=sys.stderr, flush=True)
    dumps = describe_dumps(size, options.work)
    # In a process of its own: the peak that the kernel tells of a process is never less than that of the one that
    # started it, and this one must therefore stay small. It never imports torch.
    maker = [sys.executable, "-m", "bench.compare.data", name, "--work", str(options.work)]
    try:
        subprocess.run([*maker, "--peer" if size.peer else "--no-peer"], check=True, env=environment())
        return run_rounds(size, dumps, options)
    finally:
        if not options.keep:
            shutil.rmtree(dumps.folder, ignore_errors=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes, variants, numbers = words_of("|".join(SIZES)), words_of("|".join(VARIANTS)), words_of("[1-9][0-9]*")
    parser.add_argument("--sizes", type=sizes, default=list(SIZES), help=f"commas between; of {', '.join(SIZES)}")
    parser.add_argument("--variants", type=variants, default=list(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--threads", type=numbers, default=["1", "2"], help="of tensorprobe; commas between")
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave the published peer out")
    parser.add_argument("--msprobe", action="store_true", help="our program of the name msprobe too")
    parser.add_argument(
        "--whole", action="store_true", help="give the peer small and summary whole: minutes for each run"
    )
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for one process")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "tensorprobe-bench", help="for the dumps"
    )
    parser.add_argument("--keep", action="store_true", help="leave the dumps for the next time")
    parser.add_argument("--output", type=Path, default=RESULTS / "compare.json")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.threads = [int(number) for number in options.threads]
    return options


def main() -> int:
    options = parse_options()
    without_peer(options)
    machine = describe_machine()
    options.work.mkdir(parents=True, exist_ok=True)
    cases = run_rounds(None, None, options)
    for name in options.sizes:
        cases += run_size(name, options)
        # After each size: what was measured in minutes is not lost with the size that comes next.
        report = {"machine": machine, "repeats": options.repeats, "cases": cases}
        write_report(options.output, report)
    print_tables(machine, cases)
    print(f"Written to {options.output}")
    return int(any(has_failed(case) for case in cases))


if __name__ == "__main__":
    sys.exit(main())

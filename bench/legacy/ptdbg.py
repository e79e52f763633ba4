"""Dumping and comparing by the old names (ptdbg_ascend), measured with the formulas of the old guide, beside its own figures.

    dump speed    = bytes dumped / (step with dump - plain step)
    compare speed = bytes of both dumps / time of the comparison

A worker process (ptdbg_worker.py) takes turns between plain and dumped steps; then the two dumps it leaves are compared, each
time in a process of its own. The whole is repeated. Prints tables and writes `bench/results/ptdbg.json`. Exits with 1 when a
measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.compare.table import BUSY_ABOVE
from bench.driver import RESULTS, describe_machine, say_round, words_of, write_report
from bench.processes import run_process, warm_pages
from bench.tables import Target, targets_table

WORKLOADS = ["gpt-tiny", "gpt-medium-fb"]
GUIDE = {"dump": (0.1, 0.2), "compare": (0.1, 0.3)}
"""GB/s that the guide gives on 192 cores and a solid-state disk: for little data (dumps under 5 GB, comparisons of dumps
under 10 GB), and for much."""
TARGETS = {"dump": 0.5, "compare": 1.0}
TARGET_WORKLOAD = "medium"
NOTES = """\
on disk: the step until set_dump_switch("OFF") has returned, when every file is written and closed (in the page cache).
step only: the same without waiting for OFF; the recorder is still writing then. with ON: on disk, and starting the recorder too.
call: compare() itself. process: a whole Python process that does nothing else, imports included. Files warm in the page cache.
÷ guide: over its figure for little data, which all of these are, and over its best. Medians over the repeats (least-greatest)."""


def measure_dumps(workload: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the worker measured, or `{"error": …}`; its dumps stay in the folder."""
    worker = [sys.executable, "-m", "bench.legacy.ptdbg_worker", "dump", "--workload", workload, "--work", str(folder)]
    worker += ["--steps", str(options.steps), "--threads", str(options.threads)]
    return _result_of(worker, folder, options.time_limit)


def measure_compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same for one comparison of the dumps in the folder."""
    warm_pages(folder)
    worker = [sys.executable, "-m", "bench.legacy.ptdbg_worker", "compare", "--work", str(folder)]
    return _result_of(worker, folder, options.time_limit)


def _result_of(worker: list[str], folder: Path, time_limit: float) -> dict[str, Any]:
    done = run_process(worker, folder, time_limit)
    if done.exit_code:
        return {"error": f"exit {done.exit_code}: " + "".join(done.stderr.splitlines()[-1:])}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "wall_s": done.wall_s, "cpu_s": done.cpu_s, "peak_bytes": done.peak_bytes}


def run_rounds(options: argparse.Namespace, own: Path) -> list[dict[str, Any]]:
    """A case for each workload, with what each of its rounds measured."""
    cases: dict[str, dict[str, Any]] = {
        name: {"workload": name, "dump": [], "compare": []} for name in options.workloads
    }
    for number in range(options.repeats):
        for name, case in cases.items():
            folder = own / name
            folder.mkdir()
            try:
                say_round(number, options.repeats, f"{name} dump")
                case["dump"].append(measure_dumps(name, options, folder))
                if "error" in case["dump"][-1]:
                    continue
                for _ in range(options.steps):
                    say_round(number, options.repeats, f"{name} compare")
                    case["compare"].append(measure_compare(options, folder))
            finally:
                shutil.rmtree(folder)
    return list(cases.values())


def dump_speeds(case: dict[str, Any]) -> dict[str, list[float]]:
    """GB/s of every dumped step, over the median plain step of its process."""
    speeds: dict[str, list[float]] = {"on disk": [], "step only": [], "with ON": []}
    for result in _good(case["dump"]):
        plain = statistics.median(result["plain_s"])
        for size, on, step, off in zip(result["bytes"], result["on_s"], result["step_s"], result["off_s"], strict=True):
            for label, seconds in (("on disk", step + off), ("step only", step), ("with ON", on + step + off)):
                speeds[label].append(size / 1e9 / max(seconds - plain, 1e-9))
    return speeds


def compare_speeds(case: dict[str, Any]) -> dict[str, list[float]]:
    """GB/s of every comparison."""
    results = _good(case["compare"])
    return {
        "call": [result["bytes"] / 1e9 / result["compare_s"] for result in results],
        "process": [result["bytes"] / 1e9 / result["wall_s"] for result in results],
    }


def _good(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if "error" not in result]


def print_tables(machine: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """The figures beside those of the guide, and the targets."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title="By the old names, in GB/s", box=box.SIMPLE_HEAD)
    for column in ("workload", "data", "what", "how", "GB/s", "guide", "÷ guide", "÷ its best"):
        table.add_column(column, justify="left" if column in ("workload", "data", "what", "how") else "right")
    targets: list[Target] = []
    for case in cases:
        good = _good(case["dump"])
        size = (
            f"{statistics.median(good[0]['bytes']) / 1e6:,.0f} MB in {good[0]['files']:,} files" if good else "failed"
        )
        for what, speeds in (("dump", dump_speeds(case)), ("compare", compare_speeds(case))):
            little, best = GUIDE[what]
            for how, values in speeds.items():
                if not values:
                    continue
                middle = statistics.median(values)
                spread = f"{middle:.2f} ({min(values):.2f}-{max(values):.2f})"
                shown = f"{little}-{best}"
                table.add_row(
                    case["workload"], size, what, how, spread, shown, f"{middle / little:.1f}", f"{middle / best:.1f}"
                )
                if how in ("on disk", "call") and TARGET_WORKLOAD in case["workload"]:
                    target = TARGETS[what]
                    label, measured = f"{case['workload']} {what}, {how}", f"{middle:.2f} GB/s"
                    targets.append((label, f"≥ {target} GB/s", measured, middle >= target))
    console.print(table)
    console.print(NOTES, highlight=False)
    for case in cases:
        for result in [*case["dump"], *case["compare"]]:
            if "error" in result:
                console.print(f"FAILED  {case['workload']}: {result['error']}", markup=False, highlight=False)
    if machine["load_at_start"] > BUSY_ABOVE:
        console.print(f"The machine was busy (load {machine['load_at_start']:.1f} at the start): measure again.")
    console.print(targets_table(targets))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workloads = words_of("(gpt|resnet)-(tiny|small|medium)(-fb)?")
    parser.add_argument("--workloads", type=workloads, default=WORKLOADS, help="commas between; -fb: no optimizer step")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--steps", type=int, default=2, help="dumped steps, and comparisons, in a round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the training")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for one process")
    parser.add_argument("--work", type=Path, default=RESULTS, help="where the dumps go, for a while")
    parser.add_argument("--output", type=Path, default=RESULTS / "ptdbg.json")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    machine = describe_machine()
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ptdbg-", dir=options.work) as own:
        cases = run_rounds(options, Path(own).resolve())
    write_report(options.output, {"machine": machine, "repeats": options.repeats, "cases": cases})
    print_tables(machine, cases)
    print(f"Written to {options.output}")
    return int(any("error" in result for case in cases for result in [*case["dump"], *case["compare"]]))


if __name__ == "__main__":
    sys.exit(main())

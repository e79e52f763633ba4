"""Side by side in msprobe's layout: the same scripts with our `msprobe` and with the published one, and each with the other's dumps.

Dump: `bench.peer.run`, unchanged, in both environments (the rules are in `bench.protocol`); the two take turns.
Round trip: both dump the same training step; `msprobe compare` of the published package gets ours as target, as golden, and
as both. Compare: `bench.legacy.msprobe_compare`.
Prints tables and writes `bench/results/msprobe.json`. Exits with 1 when a measurement failed. A missed target is a result.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.driver import PEER_PYTHON, RESULTS, describe_machine, prepare_peer, say_round, words_of, write_report
from bench.legacy.msprobe_compare import TARGET as COMPARE_TARGET
from bench.legacy.msprobe_compare import compare_part
from bench.processes import run_process

WORKLOADS = ["gpt-tiny", "resnet-small", "gpt-medium-fb"]
PYTHONS = {"ours": sys.executable, "peer": str(PEER_PYTHON)}
TARGETS = {"tensor": 6.0, "summary": 3.0, "digest": 3.0}
TRIPS = (("tensor", "L1"), ("tensor", "mix"), ("statistics", "mix"))
NOT_OURS = ("__bool__", "reciprocal")
"""Calls that the peer has and ours has not: a question, and the inside of `2 / x`, which is `Tensor.__rtruediv__` here."""
NOTES = """\
seconds: a dumped step until stop() has returned, less the plain step; CPU of all processes. start: starting the dump, apart.
lacks: calls of the peer's dump that ours has not, beside those that are no calls here. Medians (least-greatest)."""


def dump_part(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """A case for each workload and mode, with what each round measured."""
    cases = [
        {"workload": name, "mode": mode, "ours": [], "peer": []} for name in options.workloads for mode in options.modes
    ]
    for number in range(options.repeats):
        for case in cases:
            for tool, python in PYTHONS.items():
                label = f"{case['workload']} {case['mode']} {tool}"
                say_round(number, options.repeats, label)
                with tempfile.TemporaryDirectory(dir=work) as own:
                    worker = [
                        python,
                        "-m",
                        "bench.peer.run",
                        "--workload",
                        case["workload"],
                        "--mode",
                        case["mode"],
                    ]
                    done = run_process([*worker, "--steps", "2", "--work", own], Path(own), options.time_limit)
                if done.exit_code:
                    result = {"error": f"exit {done.exit_code}: " + "".join(done.stderr.splitlines()[-1:])}
                else:
                    result = json.loads(done.stdout.splitlines()[-1])
                case[tool].append(result)
    return cases


def overheads(rounds: list[dict[str, Any]], clock: str) -> list[float]:
    """Seconds that dumping adds to each dumped step."""
    return [
        max(step[clock] - statistics.median(plain[clock] for plain in result["plain"]), 1e-9)
        for result in rounds
        if "error" not in result
        for step in result["captured"]
    ]


def trip_part(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """What the published compare says of our dumps, and which of its own calls ours lack."""
    cases = []
    for task, level in TRIPS:
        with tempfile.TemporaryDirectory(dir=work) as own:
            dumps = {tool: _dump_step(tool, task, level, Path(own) / tool, options) for tool in PYTHONS}
            missing = set(_data(dumps["peer"])) - set(_data(dumps["ours"]))
            lacks = sorted(name for name in missing if name.split(".")[1] not in NOT_OURS)
            for target, golden in (("ours", "ours"), ("ours", "peer"), ("peer", "ours")):
                print(f"round trip: {task} {level}, target {target}, golden {golden}", file=sys.stderr, flush=True)
                out = Path(own) / "out"
                out.mkdir()
                command = [str(PEER_PYTHON.with_name("msprobe")), "compare", "-o", str(out)]
                command += ["-tp", str(dumps[target]), "-gp", str(dumps[golden])]
                done = run_process(command, Path(own), options.time_limit)
                case = {"task": task, "level": level, "target": target, "golden": golden, "lacks": lacks}
                cases.append({**case, "exit_code": done.exit_code, "results": _results(out)})
                for path in out.iterdir():
                    path.unlink()
                out.rmdir()
    return cases


def _dump_step(tool: str, task: str, level: str, folder: Path, options: argparse.Namespace) -> Path:
    folder.mkdir()
    worker = [
        PYTHONS[tool],
        "-m",
        "bench.legacy.msprobe_worker",
        "--task",
        task,
        "--level",
        level,
        "--folder",
        str(folder),
    ]
    done = run_process(worker, folder, options.time_limit)
    if done.exit_code:
        raise SystemExit(f"{tool} has dumped nothing: {done.stderr[-500:]}")
    (found,) = folder.glob("dump/step0/*/dump.json")
    return found


def _data(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())["data"]
    return data


def _results(out: Path) -> dict[str, int]:
    """How many rows have which result, and how many have no partner."""
    counts: Counter[str] = Counter()
    for path in out.glob("*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                counts[row["Result"] if row["Bench Name"] != "N/A" else "no partner"] += 1
    return dict(counts)


def list_targets(report: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (what, target, measured, reached): what dumping adds to a step, and comparing, beside the published package."""
    for case in report["dump"]:
        wall = {tool: overheads(case[tool], "wall_s") for tool in PYTHONS}
        if all(wall.values()):
            ratio, target = statistics.median(wall["peer"]) / statistics.median(wall["ours"]), TARGETS[case["mode"]]
            what = f"msprobe-layout dump, {case['workload']} {case['mode']}"
            yield what, f"≥ {target:g}x peer", f"{ratio:.1f}x", ratio >= target
    for case in report["compare"]:
        if (ratio := case["ratio"]) is not None:
            what = f"msprobe-layout compare, {case['size']}"
            yield what, f"≥ {COMPARE_TARGET:g}x peer", f"{ratio:.1f}x", ratio >= COMPARE_TARGET


def print_tables(dumped: list[dict[str, Any]], trips: list[dict[str, Any]], compared: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title="Dump: seconds added to a step", box=box.SIMPLE_HEAD)
    for column in ("workload", "mode", "ours", "peer", "peer ÷ ours", "CPU", "reached", "start ours"):
        table.add_column(column)
    for case in dumped:
        wall = {tool: overheads(case[tool], "wall_s") for tool in PYTHONS}
        cpu = {tool: overheads(case[tool], "cpu_s") for tool in PYTHONS}
        if not all(wall.values()):
            table.add_row(case["workload"], case["mode"], "failed")
            continue
        ratio, cpu_ratio = (statistics.median(each["peer"]) / statistics.median(each["ours"]) for each in (wall, cpu))
        starts = [result["start_s"] for result in case["ours"] if "error" not in result]
        shown = [f"{statistics.median(s):.2f} ({min(s):.2f}-{max(s):.2f})" for s in wall.values()]
        reached = f"{'yes' if ratio >= TARGETS[case['mode']] else 'NO'} (≥ {TARGETS[case['mode']]:g})"
        row = (*shown, f"{ratio:.1f}", f"{cpu_ratio:.1f}", reached, f"{statistics.median(starts):.2f}")
        table.add_row(case["workload"], case["mode"], *row)
    console.print(table)
    table = Table(title="Round trip: the published `msprobe compare` on our dumps", box=box.SIMPLE_HEAD)
    for column in ("task", "level", "target", "golden", "exit", "rows", "lacks"):
        table.add_column(column)
    for case in trips:
        rows = " · ".join(f"{count:,} {result}" for result, count in case["results"].items())
        lacks = ", ".join(case["lacks"][:3]) or "none"
        table.add_row(case["task"], case["level"], case["target"], case["golden"], str(case["exit_code"]), rows, lacks)
    console.print(table)
    for case in compared:
        console.print(f"compare {case['size']}: peer ÷ ours {case['ratio']}, errors {case['errors']}", markup=False)
    console.print(NOTES, highlight=False)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workloads, modes = words_of("(gpt|resnet)-(tiny|small|medium)(-fb)?"), words_of("tensor|summary|digest")
    parser.add_argument("--workloads", type=workloads, default=WORKLOADS, help="commas between; -fb: no optimizer step")
    parser.add_argument("--modes", type=modes, default=["tensor", "summary"], help="tensor, summary, digest")
    parser.add_argument("--parts", type=words_of("dump|trip|compare"), default=["dump", "trip", "compare"])
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for one process")
    parser.add_argument("--work", type=Path, default=RESULTS, help="where the dumps go, for a while")
    parser.add_argument("--output", type=Path, default=RESULTS / "msprobe.json")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if reason := prepare_peer():
        print(f"The peer cannot be installed ({reason}): there is nothing to measure against.", file=sys.stderr)
        return 1
    machine = describe_machine()
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="msprobe-", dir=options.work) as own:
        work = Path(own).resolve()
        dumped = dump_part(options, work) if "dump" in options.parts else []
        trips = trip_part(options, work) if "trip" in options.parts else []
        compared = compare_part(repeats=options.repeats, work=work) if "compare" in options.parts else []
    report = {"machine": machine, "repeats": options.repeats, "dump": dumped, "trips": trips, "compare": compared}
    write_report(options.output, report)
    print_tables(dumped, trips, compared)
    print(f"Written to {options.output}")
    failed = any("error" in result for case in dumped for tool in PYTHONS for result in case[tool])
    return int(failed or any(case["exit_code"] for case in trips) or any(case["errors"] for case in compared))


if __name__ == "__main__":
    sys.exit(main())

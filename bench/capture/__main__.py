"""Side by side: a training step plain, under tensorprobe and under the published peer.

With `--msprobe` also under our package of the peer's name: the peer's own script, unchanged, in our environment.

Every measurement is a process of its own (`worker.py`, `bench.peer.run`; the rules are in `bench.protocol`); the processes of all
tools take turns, and the whole round is repeated. Prints tables and writes `bench/results/capture.json`. Exits with 1
when a measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.capture.table import print_tables
from bench.driver import (
    PEER_PYTHON,
    RESULTS,
    Task,
    describe_machine,
    has_failed,
    run_rounds,
    without_peer,
    words_of,
    write_report,
)

PEER_LEVELS = {"module": "L0", "api": "L1", "mix": "mix"}
WORKLOADS = ["gpt-tiny", "gpt-tiny-fb", "resnet-small", "gpt-medium", "gpt-medium-fb"]
SCRIPTED = {"peer": str(PEER_PYTHON), "msprobe": sys.executable}
"""Tools that a script for msprobe runs under, with their Pythons."""
STEPS = {"tiny": 5, "small": 3, "medium": 2}


def make_task(workload: str, tool: str, mode: str = "", level: str = "") -> Task:
    """A tool on a workload. Mode `digest` is the peer's md5, beside our summary, which has digests."""
    about = {"workload": workload, "tool": tool, "mode": mode, "level": level}
    arguments = ("--workload", workload, "--steps", str(STEPS[workload.split("-")[1]]))
    if tool in SCRIPTED:
        arguments += ("--mode", mode, "--level", PEER_LEVELS[level])
        return Task("bench.peer.run", about, arguments, python=SCRIPTED[tool], needs_folder=True)
    own = {"plain": "plain", "digest": "summary"}.get(mode or tool, mode)
    arguments += ("--mode", own, *(("--level", level) if level else ()))
    return Task("bench.capture.worker", about, arguments, needs_folder=True)


def list_tasks(options: argparse.Namespace) -> Iterator[Task]:
    """The tasks of one round, in the order in which they run."""
    for workload in options.workloads:
        yield make_task(workload, "plain")
        for mode in options.modes:
            for level in options.levels:
                yield make_task(workload, "tensorprobe", mode, level)
                for tool in SCRIPTED if level in PEER_LEVELS else ():
                    if getattr(options, tool):
                        yield make_task(workload, tool, mode, level)


def parse_options() -> argparse.Namespace:
    workloads, modes = words_of("(gpt|resnet)-(tiny|small|medium)(-fb)?"), words_of("tensor|summary|digest")
    levels = words_of("module|api|mix|aten")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=workloads, default=WORKLOADS, help="commas between; -fb: no optimizer step")
    parser.add_argument("--modes", type=modes, default=["tensor", "summary"], help="tensor, summary, digest")
    parser.add_argument("--levels", type=levels, default=["api"], help="module, api, mix, aten (the peer has no aten)")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave the published peer out")
    parser.add_argument("--msprobe", action="store_true", help="our package of the name msprobe too")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--quick", action="store_true", help="one round of three workloads")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one process")
    parser.add_argument("--work", type=Path, default=RESULTS, help="where the records go, for a while")
    parser.add_argument("--output", type=Path, default=RESULTS / "capture.json")
    options = parser.parse_args()
    if options.quick:
        options.repeats = 1
        if options.workloads is WORKLOADS:
            options.workloads = ["gpt-tiny", "resnet-small", "gpt-medium"]
    return options


def main() -> int:
    options = parse_options()
    without_peer(options)
    options.work.mkdir(parents=True, exist_ok=True)
    # Only a folder of our own making is removed afterwards: --work may name one that holds other things.
    with tempfile.TemporaryDirectory(prefix="capture-", dir=options.work) as own:
        cases = run_rounds(list(list_tasks(options)), options, Path(own), options.repeats)
    machine = describe_machine()
    report = {"machine": machine, "threads": options.threads, "repeats": options.repeats, "cases": cases}
    write_report(options.output, report)
    print_tables(cases)
    print(f"Written to {options.output}")
    return int(any(has_failed(case) for case in cases))


if __name__ == "__main__":
    sys.exit(main())

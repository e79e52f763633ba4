"""Print where the time of a captured step goes: milliseconds of the training thread in each part of capture.

    .venv/bin/python -m bench.capture.where gpt-tiny tensor

Plain and captured steps alternate; each figure is the median over the rounds. The timers themselves cost about 0.3 µs a
call, so the parts add up to a little more than they really take.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch

import tensorprobe
from bench.workloads import build_named
from tensorprobe.record.snapshot import Snapshots
from tensorprobe.record.writer import RunWriter
from tensorprobe.taps.function_tap import Describing
from tensorprobe.taps.session import Session

PARTS: list[tuple[Any, str, str]] = [
    (Describing, "_before", "before the op, in all"),
    (Describing, "_after", "after the op, in all"),
    (Session, "begin_call", "number, name, stack"),
    (Snapshots, "take", "copy tensors into the ring"),
    (RunWriter, "_populate", "  of that: first use of ring memory"),
    (RunWriter, "_wait_for", "  of that: wait for the recorder"),
    (Session, "emit", "encode and send the call"),
    (Session, "watch_backward", "put hooks on the graph"),
    (Session, "_in_hook", "hooks in backward, in all"),
]


def main() -> None:
    """Measure one workload and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt-tiny")
    parser.add_argument("mode", nargs="?", default="tensor", choices=["tensor", "summary", "structure"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spent: dict[str, list[float]] = defaultdict(list)
    work = build_named(options.workload)
    for _ in range(2):
        work.step()
    timers = [_time_part(owner, name) for owner, name, _ in PARTS]
    for _ in range(options.rounds):
        spent["plain step"].append(_seconds(work.step))
        with tempfile.TemporaryDirectory(dir=".") as folder:
            probe = tensorprobe.Probe(f"{folder}/run", model=work.model, mode=options.mode).start()
            for timer in timers:
                timer.clear()
            spent["captured step"].append(_seconds(work.step))
            for (_, _, label), timer in zip(PARTS, timers, strict=True):
                spent[f"  {label}"].append(sum(timer))
            spent["stop, until all is on disk"].append(_seconds(probe.stop))
    coverage = probe.coverage
    assert coverage is not None
    print(
        f"{options.workload}, {options.mode}: {coverage.seen:,} calls, {coverage.bytes_seen / 1e6:,.0f} MB, ms in each part"
    )
    for label, seconds in spent.items():
        print(f"{1000 * statistics.median(seconds):9.1f}  {label}")


def _time_part(owner: Any, name: str) -> list[float]:
    """Wrap a method; the list that comes back gets the seconds of each call."""
    original = getattr(owner, name)
    times: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    return times


def _seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

"""One measurement of what watching for overflow costs, for bench.overflow: a GPT's training step watched, in plain steps.

Plain and watched steps take turns in one process. Starting and stopping the watch, and the first step after its start, are not in
the ratio: a training has thousands of steps for each start. What they cost is told apart. Prints one JSON line, the last of stdout.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import tensorprobe
from bench.measure import time_call
from bench.protocol import print_result
from bench.workloads import GPT_SIZES, Workload, build_named

STEPS = {"tiny": 20, "small": 4, "medium": 2}
"""Of a turn: short ones need more of them."""
TURNS = 4


def measure(workload: Workload, steps: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The times of all turns; the first of each kind warms up and is left out."""
    plain, watched, around = [], [], []

    def train() -> None:
        for _ in range(steps):
            workload.step()

    for turn in range(TURNS + 1):
        plain.append(time_call(train).wall_s / steps)
        watch = tensorprobe.overflow(workload.model, out=folder / str(turn), **settings)
        start = time_call(watch.start).wall_s
        workload.step()
        watched.append(time_call(train).wall_s / steps)
        around.append(start + time_call(watch.stop).wall_s)
        found = watch.result
        if found.exit_code or found.summary.notes:
            raise SystemExit(f"a clean training, and the watch said: {found}")
    return {
        "ratios": [after / before for before, after in zip(plain[1:], watched[1:], strict=True)],
        "plain_s": statistics.median(plain[1:]),
        "watched_s": statistics.median(watched[1:]),
        "start_and_stop_s": statistics.median(around[1:]),
        "calls_in_a_step": found.summary.calls // (steps + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(GPT_SIZES), required=True)
    parser.add_argument("--near", type=float, help="also tell of outputs within this factor of the limit")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = build_named(f"gpt-{options.size}")
    with tempfile.TemporaryDirectory(prefix="overflow-") as folder:
        print_result(measure(workload, STEPS[options.size], Path(folder), {"near": options.near}))


if __name__ == "__main__":
    main()

"""One measurement of what the watch costs, for bench.online: a GPT's training step watched, in plain steps.

Plain and watched steps take turns in one process. A watched turn is timed from before the watch starts until it has stopped, so
that what workers still have to do is in it. Prints one JSON line, the last of stdout: `ratios`, `plain_s`, `watched_s` of each
turn, and how many calls of the last one were compared.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import tensorprobe
from bench.measure import time_call
from bench.protocol import print_result
from bench.workloads import GPT_SIZES, Workload, build
from tensorprobe import sim

STEPS = {"tiny": 8, "small": 3, "medium": 2}
"""Of a turn: short ones need more of them."""
TURNS = 3
DEVICE = "npu"


def make(size: str, device: str) -> Workload:
    """The workload on the CPU, or made on the simulated device."""
    if device == "cpu":
        return build("gpt", size)
    sim.enable(DEVICE)
    with torch.device(DEVICE):
        return build("gpt", size)


def measure(workload: Workload, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The times of all turns; the first of each kind warms up and is left out."""
    plain, watched = [], []
    result = None

    def train() -> None:
        for _ in range(steps):
            workload.step()

    def train_watched() -> None:
        nonlocal result
        with tensorprobe.online(on_fail="report", **settings) as watching:
            train()
        result = watching.result

    for _ in range(TURNS + 1):
        plain.append(time_call(train).wall_s / steps)
        watched.append(time_call(train_watched).wall_s / steps)
    assert result is not None
    if result.broken or not result.compared:
        raise SystemExit(f"the watch failed: {result.first_error or 'nothing was compared'}")
    return {
        "ratios": [after / before for before, after in zip(plain[1:], watched[1:], strict=True)],
        "plain_s": statistics.median(plain[1:]),
        "watched_s": statistics.median(watched[1:]),
        "seen": result.seen,
        "compared": result.compared,
        "unsampled": result.unsampled,
        "failed": result.failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(GPT_SIZES), required=True)
    parser.add_argument("--device", choices=["cpu", "sim"], required=True)
    parser.add_argument("--reference", choices=["cpu", "cpu-fp32", "cpu-fp64"], required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {"reference": options.reference, "workers": options.workers, "every": options.every}
    print_result(measure(make(options.size, options.device), STEPS[options.size], settings))


if __name__ == "__main__":
    main()

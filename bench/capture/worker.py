"""One measurement of tensorprobe, or of the plain workload (`--mode plain`, which does not import tensorprobe).

Prints one JSON line, the last of stdout, with the keys of protocol.py; of tensorprobe also `steady`: captured steps in
the middle of a longer capture, where the record is being written meanwhile and nothing is waited for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.measure import folder_size, time_call
from bench.protocol import Trainable, discard, measure_captured, measure_plain, print_result, worker_options
from bench.workloads import build_named


class Tensorprobe:
    """`tensorprobe.Probe` as a tool under test."""

    def __init__(self, work: Path, mode: str, level: str) -> None:
        self.folder = work / "run"
        self.mode = mode
        self.level = level

    def install(self, workload: Trainable) -> None:
        # Not at the top: a plain worker and the plain steps before this must not have the package in memory.
        import tensorprobe

        self.tensorprobe = tensorprobe
        self.model = workload.model

    def start(self) -> None:
        self.probe = self.tensorprobe.Probe(str(self.folder), model=self.model, level=self.level, mode=self.mode)
        self.probe.start()

    def finish(self) -> None:
        self.probe.step()
        self.probe.stop()

    def describe(self) -> dict[str, int]:
        disk_bytes, files = folder_size(self.folder)
        coverage = json.loads((self.folder / "rank0.json").read_text())["coverage"]
        if coverage["failed"] or coverage["first_error"]:
            raise RuntimeError(f"{coverage['failed']} calls were not recorded; first: {coverage['first_error']}")
        settings = json.loads((self.folder / "manifest.json").read_text())["settings"]
        sizes = {"logical_bytes": coverage["bytes_seen"], "disk_bytes": disk_bytes, "files": files}
        return {**sizes, "budget_bytes": settings["ring_bytes"]}

    def measure_steady(self, workload: Trainable, *, steps: int) -> list[dict[str, float]]:
        """Times of `steps` captured steps; the first and the last of the capture are left out."""

        def captured_step() -> None:
            workload.step()
            self.probe.step()

        self.start()
        captured_step()
        steady = [time_call(captured_step) for _ in range(steps)]
        captured_step()
        self.probe.stop()
        discard(self.folder)
        return [asdict(item) for item in steady]


def main() -> None:
    parser = worker_options(__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["plain", "tensor", "summary", "structure"], required=True)
    parser.add_argument("--level", choices=["module", "api", "mix", "aten"], default="api")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = build_named(options.workload)
    result: dict[str, Any] = measure_plain(workload, warm_up=options.warm_up, steps=options.steps)
    if options.mode != "plain":
        tool = Tensorprobe(options.work, options.mode, options.level)
        result |= measure_captured(workload, tool, steps=options.steps)
        result["steady"] = tool.measure_steady(workload, steps=options.steps)
    print_result(result)


if __name__ == "__main__":
    main()

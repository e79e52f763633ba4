"""One measurement of the peer: a workload under its PrecisionDebugger. Runs in the peer's own environment.

Prints one JSON line, the last of stdout; the peer itself prints there too. Constructing the debugger wraps the torch
API for as long as the process lives, therefore the plain steps come first (bench.protocol).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from bench.measure import folder_size
from bench.protocol import Trainable, measure_captured, measure_plain, print_result, worker_options
from bench.workloads import build_named
from msprobe.pytorch import PrecisionDebugger

TASKS = {"tensor": ("tensor", "statistics"), "summary": ("statistics", "statistics"), "digest": ("statistics", "md5")}
"""Mode of the benchmark → the peer's task and summary_mode."""


class Peer:
    """PrecisionDebugger as a tool under test."""

    def __init__(self, work: Path, mode: str, level: str) -> None:
        self.folder = work / "dump"
        self.settings = work / "config.json"
        task, summary_mode = TASKS[mode]
        everything: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
        settings = {
            "task": task,
            "level": level,
            "dump_path": str(self.folder),
            "rank": [],
            "step": [],
            "tensor": everything,
            "statistics": {**everything, "summary_mode": summary_mode},
        }
        self.settings.write_text(json.dumps(settings))

    def install(self, workload: Trainable) -> None:
        self.model = workload.model
        self.debugger = PrecisionDebugger(config_path=str(self.settings))
        self.start()
        self.finish()

    def start(self) -> None:
        self.debugger.start(model=self.model)

    def finish(self) -> None:
        self.debugger.stop()
        self.debugger.step()

    def describe(self) -> dict[str, int]:
        disk_bytes, files = folder_size(self.folder)
        indexes = [json.loads(path.read_text())["data"] for path in self.folder.rglob("dump.json")]
        return {"logical_bytes": logical_bytes(indexes), "disk_bytes": disk_bytes, "files": files}


def logical_bytes(tree: Any) -> int:
    """Bytes of all tensors that the data of a dump.json describes: elements times size of one."""
    if isinstance(tree, list):
        return sum(logical_bytes(item) for item in tree)
    if not isinstance(tree, dict):
        return 0
    if tree.get("type") == "torch.Tensor":
        dtype: torch.dtype = getattr(torch, tree["dtype"].removeprefix("torch."))
        return int(math.prod(tree["shape"]) * dtype.itemsize)
    return sum(logical_bytes(item) for item in tree.values())


def main() -> None:
    parser = worker_options(__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=list(TASKS), required=True)
    parser.add_argument("--level", choices=["L0", "L1", "mix"], default="L1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = build_named(options.workload)
    result = measure_plain(workload, warm_up=options.warm_up, steps=options.steps)
    result |= measure_captured(workload, Peer(options.work, options.mode, options.level), steps=options.steps)
    print_result(result)


if __name__ == "__main__":
    main()

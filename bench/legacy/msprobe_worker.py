"""Leaves one dumped training step of a workload in a folder, by whichever msprobe the interpreter has: ours, or the published one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from bench.workloads import build_named
from msprobe.pytorch import PrecisionDebugger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt-tiny")
    parser.add_argument("--task", default="tensor")
    parser.add_argument("--level", default="L1")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = build_named(options.workload)
    settings = {
        "task": options.task,
        "level": options.level,
        "dump_path": str(options.folder / "dump"),
        "risk_level": "ALL",
    }
    settings |= {"rank": [], "step": [], options.task: {"scope": [], "list": [], "data_mode": ["all"]}}
    (options.folder / "config.json").write_text(json.dumps(settings))
    debugger = PrecisionDebugger(config_path=str(options.folder / "config.json"))
    debugger.start(model=work.model)
    work.step()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main()

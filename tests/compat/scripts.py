"""Runs scripts as a reader of the guide would: in a working directory that holds the script and the reader's own program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.taps.scripts import run_python, run_tool

PROGRAM = Path(__file__).with_name("small_nets.py")


def write_program(folder: Path, script: str, name: str = "train.py") -> Path:
    """The script in a folder of its own, with the nets beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAM, folder)
    path = folder / name
    path.write_text(script, encoding="utf-8")
    return path


def run_on(
    device: str, script: Path, *arguments: str, fault: str | None = None, code: int | None = 0, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script, which finds the device as its first argument; on npu inside the simulated device, with a fault if asked."""
    if device == "cpu":
        return run_python([script.name, device, *arguments], script.parent, code=code, cold=cold)
    faults = [] if fault is None else ["--fault", fault]
    command: list[str | Path] = ["sim", "--torch-npu", *faults, "--", sys.executable, script.name, device, *arguments]
    return run_tool(command, script.parent, code=code, cold=cold)

"""How a tool is measured, the same for every tool: which steps are timed, in which order, and what is left out.

A worker process builds the workload afresh, takes plain steps before anything of the tool is installed, then takes
turns: a captured step, steps with the tool installed but stopped. A captured step ends when the tool says that its
record is closed, so the flush is in it; starting the tool is timed apart. The last captured step is for memory only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from bench.measure import PeakMemory, time_call

PLAIN_FOR_EACH_CAPTURED = 3
"""Also of stopped ones: they are cheap, and every ratio hangs on the plain steps."""


class Trainable(Protocol):
    """What is trained: see workloads.py."""

    model: Any

    def step(self) -> Any: ...


class Tool(Protocol):
    """A capture tool under test. Its record goes to `folder`, which is emptied after each captured step."""

    folder: Path

    def install(self, workload: Trainable) -> None:
        """What is done once for a process."""

    def start(self) -> None:
        """What is done before a captured step."""

    def finish(self) -> None:
        """What is done after a captured step, until the record is complete on disk."""

    def describe(self) -> dict[str, int]:
        """logical_bytes, disk_bytes and files of the record just made."""


def measure_plain(workload: Trainable, *, warm_up: int, steps: int) -> dict[str, Any]:
    """Times and peak memory of steps that nothing watches."""
    for _ in range(warm_up):
        workload.step()
    with PeakMemory() as memory:
        workload.step()
    plain = [time_call(workload.step) for _ in range(PLAIN_FOR_EACH_CAPTURED * steps)]
    return {"plain": [asdict(item) for item in plain], "plain_peak_bytes": memory.bytes}


def measure_captured(workload: Trainable, tool: Tool, *, steps: int) -> dict[str, Any]:
    """Times, sizes and peak memory of captured steps, with stopped ones between them."""

    def captured_step() -> None:
        workload.step()
        tool.finish()

    install = time_call(lambda: tool.install(workload))
    starts, stopped, captured, sizes = [], [], [], {}
    for _ in range(steps):
        starts.append(time_call(tool.start))
        captured.append(time_call(captured_step))
        sizes = tool.describe()
        discard(tool.folder)
        stopped += [time_call(workload.step) for _ in range(PLAIN_FOR_EACH_CAPTURED)]
    tool.start()
    with PeakMemory() as memory:
        captured_step()
    discard(tool.folder)
    return {
        "captured": [asdict(item) for item in captured],
        "stopped": [asdict(item) for item in stopped],
        "install_s": install.wall_s,
        "start_s": statistics.median(item.wall_s for item in starts),
        "captured_peak_bytes": memory.bytes,
        **sizes,
    }


def discard(folder: Path) -> None:
    """Removes a record and waits for the disk, so that one step's writing does not slow the next."""
    shutil.rmtree(folder)
    os.sync()


def worker_options(description: str) -> argparse.ArgumentParser:
    """The arguments that every worker takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", required=True, help="for instance gpt-tiny, resnet-small, gpt-medium-fb")
    parser.add_argument("--steps", type=int, default=2, help="captured steps to time")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the record; it must exist")
    return parser


def print_result(result: dict[str, Any]) -> None:
    """The result as the last line of stdout, where the driver looks for it."""
    print(json.dumps(result), flush=True)

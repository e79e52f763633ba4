"""What the benchmarks measure with: clocks, folder sizes and peak memory.

Standard library only, because one of the workers runs in the environment of another tool.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SAMPLE_EVERY_S = 0.01


@dataclass
class Spent:
    """Time between the two ends of a `with spent()`; CPU time counts ended child processes too."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


def _cpu_seconds() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


@contextlib.contextmanager
def spent() -> Iterator[Spent]:
    """Measures its body."""
    result = Spent()
    cpu, wall = _cpu_seconds(), time.perf_counter()
    yield result
    result.wall_s = time.perf_counter() - wall
    result.cpu_s = _cpu_seconds() - cpu


def time_call(function: Callable[[], object]) -> Spent:
    """The time of one call."""
    with spent() as result:
        function()
    return result


def folder_size(folder: Path) -> tuple[int, int]:
    """(bytes, files) under `folder`."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


class PeakMemory:
    """Samples the memory of this process and its children while the `with` lasts; `bytes` is the highest sum seen.

    The share of a page (PSS) is counted, so memory shared with a child counts once. Sampling disturbs what it watches:
    never time a step under it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        ended = False
        while not ended:  # the last sample is taken after the end, so that a short step has one too
            ended = self._stop.wait(SAMPLE_EVERY_S)
            self.bytes = max(self.bytes, sum(_share_of_memory(pid) for pid in _family(os.getpid())))


def _family(pid: int) -> list[int]:
    """The process and its descendants; one that ends meanwhile is left out."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found.extend(int(child) for child in (task / "children").read_text().split())
    return found


def _share_of_memory(pid: int) -> int:
    """PSS in bytes; 0 for a process that has just ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)

"""What is done about each ATen call: with what it is compared, what it is called, and what is told of it.

A call on a device is done on the CPU in the same dtype; where the CPU has no kernel for that, in float64, rounded to it. A
call on the CPU itself would only be compared with itself: its reference is the one in float64, rounded to its dtype.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from tensorprobe.legacy.msprobe import logger
from tensorprobe.legacy.msprobe.online_results import ResultFolder
from tensorprobe.model.online import OnlineRow
from tensorprobe.report.online_text import failure_line
from tensorprobe.taps.session import Header
from tensorprobe.watches.online.chain import Compared
from tensorprobe.watches.online.checker import Checker, Found
from tensorprobe.watches.online.findings import Findings
from tensorprobe.watches.online.lifting import Arguments
from tensorprobe.watches.online.policies import Measures
from tensorprobe.watches.online.sampling import Sampler
from tensorprobe.watches.online.verdict import Case, Judged
from tensorprobe.watches.online.workers import Workers

REFERENCE, POLICY = "cpu", "seed-2024"


class DeviceChecker(Checker):
    """Compares with the CPU. Calls are named `mm_0`, `mm_1`, …: numbers go on through forward, backward and all steps."""

    def __init__(self, workers: Workers, found: Found) -> None:
        super().__init__(
            precision="own",
            measures=Measures(POLICY),
            sampler=Sampler(),
            workers=workers,
            libraries=frozenset(),
            found=found,
        )
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._naming = threading.Lock()

    def end(self, opened: Any, result: Any) -> Any:
        """As ever, but the call has the older tool's name. Not in `begin`, where a frame of ours would be in the user's stack."""
        base = opened.plan.base
        with self._naming:
            name = f"{base}_{next(self._numbers[base])}"
        return super().end(opened._replace(header=opened.header._replace(name=name)), result)

    def precision_of(self, given: Arguments) -> str:
        """The call's own where a device is involved."""
        device = given.kwargs.get("device")
        on_cpu = device is None or torch.device(device).type == "cpu"
        return "rounded" if on_cpu and all(tensor.is_cpu for _, tensor in given.tensors()) else "own"


class DispatchFindings(Findings):
    """Writes down every compared call, and says "Failed" of those that are not accurate."""

    def __init__(self, folder: ResultFolder, workers: Workers, *, rank: int, debug: bool) -> None:
        super().__init__(
            reference=REFERENCE,
            policy=POLICY,
            rank=rank,
            folder=None,
            workers=workers,
            chain=None,
            saves=False,
            stop_after=None,
            most_saved=0,
        )
        self._results, self._debug = folder, debug

    def found(self, case: Case, header: Header, order: int, rows: list[Judged], chained: Compared | None) -> None:
        """Dump the call if it is to be, tell of it, and note its outputs: a line is there only when its files are."""
        trouble = self._results.dump(case, header.name, rows)
        super().found(case, header, order, rows, chained)
        stack = [] if header.stack is None else self._stacks.get((header.step, header.stack), [])
        lines = self._results.note(case, header.name, rows, " <- ".join(stack), trouble)
        for line in lines if self._debug else ():
            logger.info("%s", line)

    def say(self, row: OnlineRow, number: int) -> None:
        """One line for each output that fails, however many there are."""
        logger.warning("%s", failure_line(row))

"""The answer as an object, and on disk. Nothing here imports torch."""

from __future__ import annotations

import os
from pathlib import Path

from tensorprobe.model.overflow import Arrival, Birth, OverflowReport
from tensorprobe.report.forms import Answer
from tensorprobe.standard_json import encode

SCHEMA_VERSION = 1


class OverflowResult(Answer):
    """What a watch, or a search in a recorded run, returns. `print(result)` shows what the command shows."""

    summary: OverflowReport

    @property
    def births(self) -> list[Birth]:
        """The calls that made a NaN or inf out of finite inputs, in causal order."""
        return self.summary.births

    @property
    def arrivals(self) -> list[Arrival]:
        """What was already not finite when it came in."""
        return self.summary.arrivals

    def __repr__(self) -> str:
        return f"<overflow: {len(self.births)} births, {len(self.arrivals)} arrivals in {self.summary.calls:,} calls>"


def report_path(folder: Path, rank: int) -> Path:
    """Where a watch has its findings."""
    return folder / f"overflow.rank{rank}.json"


def ring_path(folder: Path, rank: int) -> Path:
    """Where a watch has the last calls."""
    return folder / f"ring.rank{rank}"


def write_report(folder: Path, rank: int, report: OverflowReport) -> None:
    """The whole report, or the one before it: never half of one."""
    path = report_path(folder, rank)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(encode(report, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)

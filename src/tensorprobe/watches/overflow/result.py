"""The answer as an object, and on disk. Nothing here imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.model.overflow import Arrival, Birth, OverflowReport
from tensorprobe.report.overflow_text import render_overflow
from tensorprobe.standard_json import encode

SCHEMA_VERSION = 1


class OverflowResult:
    """What a watch, or a look at a run, gives. `print(result)` shows what the command shows."""

    def __init__(self, report: OverflowReport) -> None:
        self.summary = report

    @property
    def births(self) -> list[Birth]:
        """In causal order."""
        return self.summary.births

    @property
    def arrivals(self) -> list[Arrival]:
        """What was not finite when it came in."""
        return self.summary.arrivals

    @property
    def exit_code(self) -> int:
        """0: all is finite, or infinite on purpose. 1: something was born or came in. 2: nothing could be looked at."""
        return self.summary.exit_code

    def to_json(self) -> str:
        """The whole answer as standard JSON."""
        return encode(self.summary)

    def to_dict(self) -> dict[str, Any]:
        """The whole answer as plain dicts and lists."""
        plain: dict[str, Any] = msgspec.to_builtins(self.summary)
        return plain

    def __str__(self) -> str:
        return render_overflow(self.summary)

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

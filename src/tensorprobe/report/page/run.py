"""The page of one run: its calls and tensors with their statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tensorprobe.model.call import Call
from tensorprobe.model.overview import RunOverview
from tensorprobe.report.inspect import render_run
from tensorprobe.report.page.data import (
    MOST_ROWS,
    CallRow,
    Command,
    Page,
    Side,
    Tone,
    Verdict,
    listed,
    matrix,
)
from tensorprobe.text import counted, shell, size

STATUSES: dict[str, Tone] = {"finite": "good", "unrecorded": "quiet", "not_finite": "warn"}
_KINDS = {
    "slot": "word", "side": "word", "dtype": "word", "shape": "word", "max": "ratio", "min": "ratio", "mean": "ratio", "norm": "ratio",
    "nan": "count", "inf": "count", "nbytes": "count",
}  # fmt: skip


class CallAt(NamedTuple):
    """A call of a run and where it stands."""

    call: Call
    step: int
    rank: int
    line: int


def run_page(overview: RunOverview, calls: Iterable[CallAt], *, full: bool = False, source: bool = True) -> Page:
    """Return the page of a run. Without `full`, it holds the first calls, up to 100,000 tensors."""
    held: list[CallRow] = []
    rows: list[dict[str, object]] = []
    worst: dict[tuple[int, int], int] = {}
    seen = 0
    for at in calls:
        seen += 1
        status, greatest = _state(at.call)
        place = (at.rank, at.step)
        worst[place] = max(worst.get(place, -1), list(STATUSES).index(status))
        if not full and len(rows) >= MOST_ROWS:
            continue
        own = _rows(at.call)
        rows += own
        held.append(
            CallRow(
                at.call.name,
                status,
                len(own),
                at.step,
                at.rank,
                at.line,
                at.call.module,
                at.call.direction,
                str(at.call.level),
                greatest,
            )
        )
    bad = sum(1 for call in held if call.status == "not_finite")
    sentence = ", ".join(
        [
            counted(len(overview.steps), "step"),
            counted(len(overview.ranks), "rank"),
            counted(overview.calls, "call"),
            f"{size(overview.size_bytes)} of tensors",
        ]
    )
    text = render_run(overview).splitlines()
    return Page(
        kind="run",
        tool=overview.tool,
        title=overview.path if source else "",
        verdict=Verdict(
            tone="warn" if overview.damaged else "quiet",
            headline="DAMAGED" if overview.damaged else "RUN",
            sentence=sentence,
        ),
        counts={name: count for name, count in (("not_finite", bad), ("finite", overview.calls - bad)) if count},
        total_calls=overview.calls,
        sides=[
            Side(
                role="run",
                path=overview.path,
                facts=[f"torch {overview.torch}", *sorted(set(overview.devices.values()))],
            )
        ]
        if source
        else [],
        commands=[Command(key="inspect", text=f"tensorprobe inspect {shell(overview.path)} {shell(overview.example)}")]
        if overview.example and source
        else [],
        notes=[line.strip() for line in text if line.strip()][:40] if source else [],
        matrix=matrix(worst),
        measure="max",
        **listed(held, rows, statuses=STATUSES, kinds=_KINDS),
        selected=next((at for at, call in enumerate(held) if call.status == "not_finite"), 0 if held else -1),
        left_out=f"{len(held):,} of {seen:,} calls are in this file." if len(held) < seen else "",
        source=source,
    )


def _state(call: Call) -> tuple[str, float]:
    """Return whether the results of a call are finite, and the greatest magnitude among them."""
    summaries = [slot.summary for slot in call.slots if slot.side != "input" and slot.summary is not None]
    if not summaries:
        return "unrecorded", math.nan
    sizes = [
        abs(float(edge)) for summary in summaries for edge in (summary.max, summary.min) if not math.isnan(float(edge))
    ]
    bad = any(summary.nan > 0 or summary.inf > 0 for summary in summaries)
    return ("not_finite" if bad else "finite"), max(sizes, default=math.nan)


def _rows(call: Call) -> list[dict[str, object]]:
    rows = []
    for slot in call.slots:
        known = dict.fromkeys(("max", "min", "mean", "norm", "nan", "inf"), math.nan)
        if slot.summary is not None:
            known = {name: float(value) for name, value in msgspec.structs.asdict(slot.summary).items()}
        rows.append(
            {
                "slot": slot.name,
                "side": slot.side,
                "dtype": slot.dtype,
                "shape": str(list(slot.shape)),
                "nbytes": slot.nbytes,
                **known,
            }
        )
    return rows

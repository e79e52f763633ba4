"""What the capture benchmark says of its raw results: ratios, speeds, targets. Prints them; measures nothing.

A case is `{workload, tool, mode, level, rounds}`, a round what a worker printed. All figures are medians over the
rounds; a ratio is taken within one process, of the medians of its captured and its plain steps.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.tables import targets_table

Round = dict[str, Any]
Case = dict[str, Any]

STEP_TARGETS = {
    ("tensor", "tiny"): 2.5,
    ("tensor", "resnet-small"): 1.35,
    ("tensor", "medium"): 1.3,
    ("summary", "tiny"): 2.2,
    ("summary", "resnet-small"): 1.25,
    ("summary", "medium"): 1.2,
}
"""(mode, part of the workload's name) → how long a captured step may be, flush included, in plain steps (API level)."""
SPEED_TARGET = 8.0
"""Tensor mode at API level: GB/s in multiples of the peer's."""
DUMP_TARGETS = {"tensor": 6.0, "summary": 3.0, "digest": 3.0}
"""By the name of msprobe: the peer's added time over ours."""
STOPPED_TARGET = 1.03
"""No measurable cost when stopped: the fastest stopped step against the fastest plain one."""
MEMORY_TARGET_BYTES = 200e6
"""Over the plain peak and the byte budget."""
DISTURBED_ABOVE = 1.15
"""Plain steps of one workload that differ by more than this between processes make a row unfit for judging."""

COLUMNS = ["step s", "step / plain", "GB/s", "÷ peer", "extra ÷ peer", "MB seen → disk", "peak MB"]
COLUMNS += ["steady", "stopped", "CPU", "start s"]
NOTES = """\
step / plain: captured over plain step, flush included (until the record is closed on disk); median over the rounds
  (least-greatest). Left out for both tools alike: start() (`start s`) and, once for a process, loading or constructing
  the tool (`install_s` in the JSON).
GB/s: bytes of the tensors seen / (captured step - plain step). ÷ peer: our GB/s over the peer's.
extra ÷ peer: the peer's added time over ours, whatever bytes each of them counts.
steady: a captured step within a longer capture, flush not included. stopped: tool installed, capture stopped.
CPU: CPU seconds of the captured step, child processes included, over those of the plain step.
tool ~: disturbed. Its plain steps took over 15 % more or less time than those of the plain process; measure again.
peak: plain → captured; memory of the process and its children, pages shared between them counted once."""


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g}-{self.greatest:.3g})"


def _median(result: Round, kind: str, clock: str = "wall_s") -> float:
    return float(statistics.median(item[clock] for item in result[kind]))


def _over_rounds(case: Case | None, figure: Callable[[Round], float]) -> Spread | None:
    """The figure of each round that went well; None when there is none."""
    values = [figure(result) for result in case["rounds"] if "error" not in result] if case else []
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def step_ratio(result: Round) -> float:
    """How many plain steps a captured one takes."""
    return _median(result, "captured") / _median(result, "plain")


def extra_seconds(result: Round) -> float:
    """What capture adds to a step; never less than a microsecond, so that noise does not make a speed negative."""
    return max(_median(result, "captured") - _median(result, "plain"), 1e-6)


def gigabytes_a_second(result: Round) -> float:
    """Bytes seen for each second that capture adds."""
    return float(result["logical_bytes"] / extra_seconds(result) / 1e9)


def steady_ratio(result: Round) -> float:
    """A captured step within a longer capture, in plain steps."""
    return _median(result, "steady") / _median(result, "plain")


def stopped_ratio(result: Round) -> float:
    """A step with the tool installed but stopped, in plain steps; of the fastest ones, the least disturbed."""
    stopped, plain = (min(float(item["wall_s"]) for item in result[kind]) for kind in ("stopped", "plain"))
    return stopped / plain


def is_disturbed(case: Case, cases: list[Case]) -> bool:
    """Whether the machine was busy with something else: plain steps of this case are not what they are elsewhere."""
    alone = next((c for c in cases if c["tool"] == "plain" and c["workload"] == case["workload"]), None)
    here, there = (_over_rounds(c, lambda r: _median(r, "plain")) for c in (case, alone))
    ratio = _divided(here, there)
    return ratio is not None and not 1 / DISTURBED_ABOVE < ratio < DISTURBED_ABOVE


def _text(spread: Spread | None, form: str = "{:.2f}") -> str:
    return form.format(spread.median) if spread else "-"


def _peer_of(case: Case, cases: list[Case]) -> Case | None:
    key = (case["workload"], case["mode"], case["level"])
    return next((c for c in cases if c["tool"] == "peer" and (c["workload"], c["mode"], c["level"]) == key), None)


def _divided(over: Spread | None, under: Spread | None) -> float | None:
    return over.median / under.median if over and under else None


def _figures(case: Case, cases: list[Case]) -> list[str]:
    """The columns after the names; one column with the reason when every round failed."""
    if all("error" in result for result in case["rounds"]):
        return [case["rounds"][0]["error"]]
    plain_peak = _text(_over_rounds(case, lambda r: r["plain_peak_bytes"] / 1e6), "{:,.0f}")
    if case["tool"] == "plain":
        seconds = _over_rounds(case, lambda r: _median(r, "plain"))
        return [_text(seconds, "{:.3f}"), *[""] * 5, plain_peak]
    peer = _peer_of(case, cases) if case["tool"] != "peer" else None
    speed, extra = _over_rounds(case, gigabytes_a_second), _over_rounds(case, extra_seconds)
    faster = _divided(speed, _over_rounds(peer, gigabytes_a_second))
    cheaper = _divided(_over_rounds(peer, extra_seconds), extra)
    seen = _text(_over_rounds(case, lambda r: r["logical_bytes"] / 1e6), "{:,.0f}")
    stored = _text(_over_rounds(case, lambda r: r["disk_bytes"] / 1e6), "{:,.1f}")
    peak = _text(_over_rounds(case, lambda r: r["captured_peak_bytes"] / 1e6), "{:,.0f}")
    return [
        _text(_over_rounds(case, lambda r: _median(r, "captured")), "{:.3f}"),
        str(_over_rounds(case, step_ratio)),
        _text(speed, "{:.3g}"),
        f"{faster:.1f}" if faster else "",
        f"{cheaper:.1f}" if cheaper else "",
        f"{seen} → {stored}",
        f"{plain_peak} → {peak}",
        _text(_over_rounds(case, steady_ratio)) if case["tool"] == "tensorprobe" else "",
        _text(_over_rounds(case, stopped_ratio)),
        _text(_over_rounds(case, lambda r: _median(r, "captured", "cpu_s") / _median(r, "plain", "cpu_s"))),
        _text(_over_rounds(case, lambda r: r["start_s"]), "{:.3f}"),
    ]


def list_targets(cases: list[Case]) -> list[tuple[str, str, str, str]]:
    """(what, target, measured, reached) for each target that these cases can answer."""
    rows: list[tuple[str, str, str, str]] = []
    for case in (c for c in cases if c["tool"] in ("tensorprobe", "msprobe")):
        if all("error" in result for result in case["rounds"]):
            continue
        label = f"{case['workload']} {case['mode']} {case['level']}"
        label += ", dump by the name of msprobe" if case["tool"] == "msprobe" else ""
        peer = _peer_of(case, cases)
        unsure = is_disturbed(case, cases) or (peer is not None and is_disturbed(peer, cases))
        found = _dump_target(case, peer) if case["tool"] == "msprobe" else _targets_of(case, peer)
        for what, target, measured, reached in found:
            verdict = "yes" if reached else "NO"
            rows.append((f"{label}: {what}", target, measured, f"{verdict} (disturbed)" if unsure else verdict))
    return rows


def _targets_of(case: Case, peer: Case | None) -> Iterator[tuple[str, str, str, bool]]:
    step, stopped = _over_rounds(case, step_ratio), _over_rounds(case, stopped_ratio)
    speed, extra = _over_rounds(case, gigabytes_a_second), _over_rounds(case, extra_seconds)
    if step is None or stopped is None:
        return
    limits = [v for (mode, part), v in STEP_TARGETS.items() if mode == case["mode"] and part in case["workload"]]
    if limits and case["level"] == "api":
        yield "step", f"≤ {limits[0]}x", f"{step.median:.2f}x", step.median <= limits[0]
    faster = _divided(speed, _over_rounds(peer, gigabytes_a_second))
    cheaper = _divided(_over_rounds(peer, extra_seconds), extra)
    if faster and (case["mode"], case["level"]) == ("tensor", "api"):
        measured = f"{faster:.1f}x (by added time alone {cheaper:.1f}x)"
        yield "GB/s", f"≥ {SPEED_TARGET:.0f}x peer", measured, faster >= SPEED_TARGET
    yield "stopped", f"≤ {STOPPED_TARGET}x", f"{stopped.median:.3f}x", stopped.median <= STOPPED_TARGET
    yield from _memory_target(case)


def _dump_target(case: Case, peer: Case | None) -> Iterator[tuple[str, str, str, bool]]:
    cheaper = _divided(_over_rounds(peer, extra_seconds), _over_rounds(case, extra_seconds))
    if cheaper:
        target = DUMP_TARGETS[case["mode"]]
        yield "added time", f"≥ {target:g}x peer", f"{cheaper:.1f}x", cheaper >= target


def _memory_target(case: Case) -> Iterator[tuple[str, str, str, bool]]:
    over = _over_rounds(case, lambda r: r["captured_peak_bytes"] - r["plain_peak_bytes"])
    budget = _over_rounds(case, lambda r: r["budget_bytes"])
    if over and budget:
        allowed = budget.median + MEMORY_TARGET_BYTES
        figures = f"≤ plain + {allowed / 1e6:,.0f} MB", f"plain + {over.median / 1e6:,.0f} MB"
        yield "peak memory", *figures, over.median <= allowed


def print_tables(cases: list[Case]) -> None:
    """The figures, what they mean, and the targets."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    figures = Table(title="Capture of one training step", box=box.SIMPLE_HEAD)
    for column in ("workload", "mode", "tool"):
        figures.add_column(column)
    for column in COLUMNS:
        figures.add_column(column, justify="right")
    for case in cases:
        if case["tool"] == "plain":
            figures.add_section()
        tool = case["tool"] + (" ~" if is_disturbed(case, cases) else "")
        figures.add_row(case["workload"], f"{case['mode']} {case['level']}", tool, *_figures(case, cases))
    console.print(figures)
    console.print(NOTES, highlight=False)
    console.print(targets_table(list_targets(cases)))

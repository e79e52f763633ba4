"""What the compare benchmark says of its raw results: seconds, speeds, ratios, targets. Prints them; measures nothing.

A case is `{size, variant, tool, threads, calls, slots, pair_bytes, rounds}`; an item of `rounds` is what one process took,
with the number of its round. A ratio is taken within a round, where both tools met the same machine, and only from
rounds in which both gave a right answer: what one tool took in a quiet minute says nothing beside a busy one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.tables import targets_table

Case = dict[str, Any]

TARGETS = (("noisy", 2, 50.0), ("cold", 2, 15.0))
"""Variant, our threads, how many times as fast as the peer on the large size."""
OLD_NAME_TARGET = 20.0
"""By the name of msprobe, on the peer's own dumps: how many times as fast as the peer."""
PAIRS_S, SUMMARY_S, START_S = 1.0, 1.5, 0.15
"""Seconds of 100,000 small pairs and of the statistics of 100,000 calls, whole processes; CPU seconds of `--help`."""
BUSY_ABOVE = 0.5
"""A machine with this load before anything was started gives no figures to judge by."""
DISTURBED_ABOVE = 1.5
"""A case whose slowest process took this many times as long as its fastest is unfit for judging."""
COLUMNS = ["best s", "median s", "CPU s", "GB/s", "pairs/s", "÷ peer", "÷ peer CPU", "÷ peer, no start"]
COLUMNS += ["peak MB", "from disk MB"]
NOTES = """\
Whole processes. best, median: wall time over the rounds; CPU: median, child processes included.
GB/s, pairs/s: bytes of both sides, and pairs of tensors, over the median, also where equal digests
  saved the reading (identical).
÷ peer: the peer's wall time over ours within a round; median over the rounds (least-greatest). CPU: the same of CPU time.
no start: both less the median of their own `--help`, which is mostly loading the program.
cold: the files were dropped from the page cache before; `from disk` shows whether they were. The peer's cold and
identical runs are single ones. peak: memory of the largest process, mapped files included.
tool ~: disturbed. Its slowest process took over 1.5 times as long as its fastest; measure again."""


def print_tables(machine: dict[str, Any], cases: list[Case]) -> None:
    """The figures, what they mean, and the targets."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    figures = Table(title="Comparing two runs", box=box.SIMPLE_HEAD)
    for column in ("size", "variant", "tool"):
        figures.add_column(column)
    for column in COLUMNS:
        figures.add_column(column, justify="right")
    before = None
    for case in cases:
        if case["size"] != before:
            figures.add_section()
        before = case["size"]
        tool = case["tool"] + (f" -t {case['threads']}" if case["threads"] else "")
        tool += " ~" if is_disturbed(case) else ""
        figures.add_row(case["size"], case["variant"], tool, *_figures(case, cases))
    console.print(figures)
    console.print(NOTES, highlight=False)
    for case in cases:
        for reason in sorted({result["error"] for result in case["rounds"] if "error" in result}):
            label = f"{case['size']} {case['variant']} {case['tool']}"
            console.print(f"FAILED  {label}: {reason}", markup=False, highlight=False)
    if machine["load_at_start"] > BUSY_ABOVE:
        console.print(f"The machine was busy (load {machine['load_at_start']:.1f} at the start): measure again.")
    console.print(targets_table(list_targets(cases)))


def _walls(case: Case | None, clock: str = "wall_s") -> list[float]:
    return [result[clock] for result in case["rounds"] if "error" not in result] if case else []


def _median(case: Case | None, clock: str = "wall_s") -> float | None:
    values = _walls(case, clock)
    return statistics.median(values) if values else None


def _best(case: Case | None) -> float | None:
    return min(_walls(case), default=None)


def _find(cases: list[Case], **wanted: Any) -> Case | None:
    return next((case for case in cases if all(case[key] == value for key, value in wanted.items())), None)


def _divided(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def is_disturbed(case: Case | None) -> bool:
    """Whether the machine did something else meanwhile."""
    walls = _walls(case)
    return bool(walls) and max(walls) > DISTURBED_ABOVE * min(walls)


def _by_round(case: Case | None, clock: str) -> dict[int, float]:
    """The median of each round in which every process of the case went well."""
    rounds: dict[int, list[Any]] = {}
    for result in case["rounds"] if case else []:
        rounds.setdefault(result["round"], []).append(result.get(clock))
    return {number: statistics.median(values) for number, values in rounds.items() if None not in values}


def _ratios(peer: Case | None, case: Case | None, clock: str = "wall_s") -> list[float]:
    """The peer's time over ours, of each round that both have."""
    theirs, ours = _by_round(peer, clock), _by_round(case, clock)
    return [theirs[number] / ours[number] for number in theirs if number in ours]


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return ""
    middle = f"{statistics.median(ratios):.1f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.1f}-{max(ratios):.1f})"


def _less_start(case: Case | None, cases: list[Case], beside: Case | None = None) -> float | None:
    """The median over the rounds, those only that `beside` has too, without what `--help` takes; None if too little."""
    walls = _by_round(case, "wall_s")
    shared = [wall for number, wall in walls.items() if beside is None or number in _by_round(beside, "wall_s")]
    start = _median(_find(cases, size="help", tool=case["tool"])) if case else None
    rest = statistics.median(shared) - start if shared and start is not None else 0.0
    return rest if rest > 0.01 else None


def _figures(case: Case, cases: list[Case]) -> list[str]:
    """The columns after the names."""
    median = _median(case)
    if median is None:
        return ["failed"]
    ours = case["tool"] != "peer"
    peer = _find(cases, size=case["size"], variant=case["variant"], tool="peer") if ours else None
    return [
        _text(_best(case)),
        _text(median),
        _text(_median(case, "cpu_s")),
        _text(_divided(case.get("pair_bytes", 0) / 1e9 or None, median)),
        _text(_divided(case.get("slots"), median), "{:,.0f}"),
        _spread(_ratios(peer, case)),
        _spread(_ratios(peer, case, "cpu_s")),
        _text(_divided(_less_start(peer, cases, case), _less_start(case, cases, peer)), "{:.1f}"),
        _text(_median(case, "peak_bytes"), "{:,.0f}", 1e-6),
        _text(_median(case, "disk_read_bytes"), "{:,.0f}", 1e-6),
    ]


def _text(figure: float | None, form: str = "{:.3g}", factor: float = 1.0) -> str:
    return "" if figure is None else form.format(figure * factor)


def list_targets(cases: list[Case]) -> Iterator[tuple[str, str, str, bool]]:
    """(what, target, measured, reached) for each target that these cases can answer."""
    for variant, threads, target in TARGETS:
        case = _find(cases, size="large", variant=variant, tool="tensorprobe", threads=threads)
        peer = _find(cases, size="large", variant=variant, tool="peer")
        if ratios := _ratios(peer, case):
            label = f"large, {'cold' if variant == 'cold' else 'warm'}, {threads} threads"
            label += " (disturbed)" if is_disturbed(case) or is_disturbed(peer) else ""
            yield label, f"≥ {target:.0f}x peer", f"{_spread(ratios)}x", statistics.median(ratios) >= target
    for case in (case for case in cases if case["tool"] == "msprobe" and case["variant"] == "noisy"):
        if ratios := _ratios(_find(cases, size=case["size"], variant="noisy", tool="peer"), case):
            reached = statistics.median(ratios) >= OLD_NAME_TARGET
            yield f"{case['size']}, by msprobe's name", f"≥ {OLD_NAME_TARGET:g}x peer", f"{_spread(ratios)}x", reached
    for name, limit in (("small", PAIRS_S), ("summary", SUMMARY_S)):
        case = _quickest(cases, name)
        if (seconds := _median(case)) and case:
            what = f"{name}: {case['calls']:,} calls, {case['slots']:,} pairs"
            yield what, f"≤ {limit} s", f"{seconds:.2f} s ({case['threads']} threads)", seconds <= limit
    for case in cases:
        beside = _find(cases, **{key: case[key] for key in ("size", "tool", "threads")}, variant="noisy")
        if case["variant"] == "proved" and (seconds := _median(case)) and (without := _median(beside)):
            what = f"{case['size']}: with proof, {case['threads']} threads"
            yield what, "measured", f"{seconds:.2f} s, without {without:.2f} s", True
    start = _median(_find(cases, size="help", tool="tensorprobe"), "cpu_s")
    if start is not None:
        yield "--help", f"≤ {START_S} s CPU", f"{start:.2f} s", start <= START_S


def _quickest(cases: list[Case], size: str) -> Case | None:
    """Our noisy case of that size, with the number of threads that took least."""
    ours = [c for c in cases if (c["size"], c["variant"], c["tool"]) == (size, "noisy", "tensorprobe") and _walls(c)]
    return min(ours, key=lambda case: _median(case) or 0.0, default=None)

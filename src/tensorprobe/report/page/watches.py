"""The pages of an online comparison and of a search for NaN and inf."""

from __future__ import annotations

import math

import msgspec

from tensorprobe.model.call import Frame
from tensorprobe.model.online import OnlineResult, OnlineRow
from tensorprobe.model.overflow import Arrival, FirstNonfinite, OverflowReport
from tensorprobe.report import overflow_text
from tensorprobe.report.page.data import (
    WORDS,
    CallRow,
    Command,
    First,
    Item,
    Page,
    Side,
    Tone,
    Verdict,
    judged,
    listed,
)
from tensorprobe.text import counted, shell
from tensorprobe.version import VERSION

_ONLINE: dict[str, Tone] = {"pass": "good", "fail": "bad"}
_ONLINE_KINDS = WORDS | dict.fromkeys(("measured", "allowed", "relative_l2", "max_abs", "one_minus_cosine"), "error")
_OVERFLOW: dict[str, Tone] = {"near": "warn", "arrival": "bad", "nonfinite": "bad"}
_OVERFLOW_KINDS = {
    "slot": "word", "side": "word", "dtype": "word", "shape": "word", "message": "word", "nan": "count", "inf": "count", "max": "error",
}  # fmt: skip


def online_page(result: OnlineResult, *, full: bool = False, source: bool = True) -> Page:
    """Return the page of an online comparison: what failed, and where the accumulated error was the largest."""
    held = [*result.failures, *(row for row in result.diverged if row not in result.failures)]
    held.sort(key=lambda row: row.order)
    calls = [_online_call(row) for row in held]
    first = result.failures[0] if result.failures else None
    headline = "FAILED" if result.failed else "AGREES" if result.compared else "NOTHING COMPARED"
    compared = f"{result.compared:,} ATen calls in {counted(len(result.steps), 'step')}, rank {result.rank}"
    sentence = f"{result.failed:,} of {compared} fail" if result.failed else f"{compared} agree with the reference"
    if not result.compared:
        sentence = f"{result.seen:,} ATen calls were seen, and none could be compared"
    skipped = {reason: sum(ops.values()) for reason, ops in result.skipped.items()}
    counts = {
        "failed": result.failed,
        "compared": result.compared - result.failed,
        "skipped": sum(skipped.values()),
        "unsampled": result.unsampled,
        "filtered": result.filtered,
        "broken": result.broken,
    }
    return Page(
        kind="online",
        tool=VERSION,
        title=f"rank {result.rank}",
        verdict=Verdict(
            tone="bad" if result.failed else "good" if result.compared else "quiet",
            headline=headline,
            sentence=sentence,
            lines=[sentence],
        ),
        first=None if first is None else _online_first(first, source),
        counts={name: count for name, count in counts.items() if count},
        total_calls=result.seen,
        sides=[Side(role="reference", path=result.reference, facts=[result.policy])],
        commands=[Command(key="script", text=f"python {shell(first.saved)}/replay.py")]
        if first is not None and first.saved and source
        else [],
        notes=[
            *(f"blind spot: {spot} {count:,}" for spot, count in result.blind_spots.items()),
            *([f"first error of the tool: {result.first_error}"] if result.first_error and source else []),
        ],
        items=[
            *(Item(kind="reason", call=f"{count:,}", detail=reason) for reason, count in skipped.items()),
            *(
                Item(kind="fail", call=op, detail=f"{count.failed:,} of {count.compared:,} calls fail")
                for op, count in result.ops.items()
                if count.failed
            ),
        ],
        items_total=len(skipped) + sum(1 for count in result.ops.values() if count.failed),
        measure="relative_l2",
        **listed(calls, [_online_row(row) for row in held], statuses=_ONLINE, kinds=_ONLINE_KINDS),
        selected=next((at for at, row in enumerate(held) if row is first), -1),
        source=source,
    )


def _online_call(row: OnlineRow) -> CallRow:
    return CallRow(
        name=row.call,
        status=row.result if row.result in _ONLINE else "pass",
        rows=1,
        step=row.step,
        rank=row.rank,
        line=row.order,
        module=row.module,
        direction="backward" if row.call.endswith(".backward") else "forward",
        level="aten",
        error=row.relative_l2,
        limit=row.allowed if row.judged_by == "relative_l2" else math.nan,
    )


def _online_row(row: OnlineRow) -> dict[str, object]:
    held = {name: getattr(row, name) for name in _ONLINE_KINDS if hasattr(row, name)}
    return {**held, "side": "output", "shape": str(row.shape), "verdict": row.result}


def _online_first(row: OnlineRow, source: bool) -> First:
    return First(
        step=row.step,
        rank=row.rank,
        index=row.order,
        call=row.call,
        module=row.module,
        status="fail",
        dtype=row.dtype,
        inputs="identical",
        message=row.message,
        source=Frame(row.stack[0], 0, "", "") if row.stack and source else None,
        **judged(row),
    )


def overflow_page(report: OverflowReport, *, full: bool = False, source: bool = True) -> Page:
    """Return the page of an overflow report: the calls that made NaN or inf, and what came in from outside."""
    if not source:
        report = _without_paths(report)
    calls: list[CallRow] = []
    rows: list[dict[str, object]] = []
    for number, found in enumerate(report.first_nonfinite):
        rows += [_bad_output(found, at) for at in range(len(found.outputs))]
        calls.append(_finding(found, "nonfinite", len(found.outputs), number))
    for arrival in report.arrivals:
        rows.append(_overflow_row(arrival.slot, arrival.dtype, arrival.shape, arrival.what, arrival.nan, arrival.inf))
        calls.append(_finding(arrival, "arrival", 1, len(calls)))
    for near in report.near:
        message = f"greatest {near.greatest:.3g} of {near.limit:.3g}, {near.times:,} times"
        rows.append(_overflow_row("output", near.dtype, [], message, 0, 0, near.greatest))
        calls.append(CallRow(near.call, "near", 1, near.step, near.rank, len(calls), near.module, error=near.greatest))
    first = report.first_nonfinite[0] if report.first_nonfinite else None
    headline = overflow_text.headline(report).rstrip(":")
    counts = {"nonfinite": len(report.first_nonfinite), "arrival": len(report.arrivals), "near": len(report.near)}
    checked = report.calls - len(report.first_nonfinite) - len(report.arrivals) - len(report.near)
    return Page(
        kind="overflow",
        tool=report.tool,
        title=report.source if source else "",
        verdict=Verdict(
            tone={0: "good", 1: "bad"}.get(report.exit_code, "quiet"),  # type: ignore[arg-type]
            headline=headline,
            sentence=overflow_text.verdict(report),
            lines=overflow_text.render_overflow(report).splitlines()[1:8],
        ),
        first=None if first is None else _overflow_first(first),
        counts={name: count for name, count in {**counts, "finite": max(0, checked)}.items() if count},
        total_calls=report.calls,
        sides=[Side(role="run", path=report.source, facts=[f"rank {rank}" for rank in report.ranks[:8]])],
        commands=[Command(key="script", text=f"python {shell(first.script)}")]
        if first is not None and first.script
        else [],
        notes=[
            *report.notes,
            *(f"intended infinities: {op} {count:,}" for op, count in report.intended.items()),
            *([f"{report.left_out:,} findings beyond the maximum were not kept"] if report.left_out else []),
        ],
        items=[
            Item(kind="nonfinite", call=name, detail="spread to")
            for found in report.first_nonfinite[:1]
            for name in found.spread
        ],
        items_total=first.spread_count if first is not None else 0,
        **listed(calls, rows, statuses=_OVERFLOW, kinds=_OVERFLOW_KINDS),
        selected=0 if calls else -1,
        source=source,
    )


def _finding(found: FirstNonfinite | Arrival, status: str, rows: int, order: int) -> CallRow:
    return CallRow(
        name=found.call,
        status=status,
        rows=rows,
        step=found.step,
        rank=found.rank,
        line=found.index,
        module=found.module,
        direction="backward" if found.call.endswith(".backward") else "forward",
        error=math.inf,
    )


def _bad_output(found: FirstNonfinite, at: int) -> dict[str, object]:
    output = found.outputs[at]
    places = ", ".join(map(str, output.first[:3]))
    message = f"{output.count:,} of {output.elements:,} elements, first at {places}; {found.verdict}: {found.reason}"
    return _overflow_row(output.slot, output.dtype, output.shape, message, output.nan, output.inf)


def _overflow_row(
    slot: str, dtype: str, shape: list[int], message: str, nan: int, inf: int, greatest: float = math.nan
) -> dict[str, object]:
    return {
        "slot": slot,
        "side": "output",
        "dtype": dtype,
        "shape": str(shape) if shape else "",
        "message": message,
        "nan": nan,
        "inf": inf,
        "max": greatest,
    }


def _overflow_first(found: FirstNonfinite) -> First:
    output = found.outputs[0] if found.outputs else None
    inputs = "; ".join(
        f"{extent.slot} {extent.dtype} {extent.shape} from {extent.min:.3g} to {extent.max:.3g}"
        for extent in (*found.inputs, *found.forward)
    )
    return First(
        step=found.step,
        rank=found.rank,
        index=found.index,
        call=found.call,
        module=found.module,
        status="nonfinite",
        slot="" if output is None else output.slot,
        dtype="" if output is None else output.dtype,
        shape="" if output is None else str(output.shape),
        message=f"{found.verdict}: {found.reason}" + (f" Inputs: {inputs}" if inputs else ""),
        source=found.frames[0] if found.frames else None,
    )


def _without_paths(report: OverflowReport) -> OverflowReport:
    replace = msgspec.structs.replace
    return replace(
        report,
        source="run",
        first_nonfinite=[replace(found, frames=[], script=None, note="") for found in report.first_nonfinite],
        arrivals=[replace(arrival, frames=[]) for arrival in report.arrivals],
        notes=[note for note in report.notes if "/" not in note],
    )

"""What an overflow watch and `tensorprobe overflow` print: the first bad call, what led to it, what it spread to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tensorprobe.model.call import Frame
from tensorprobe.model.overflow import Arrival, Arrived, BadOutput, Extent, FirstNonfinite, NearLimit, OverflowReport
from tensorprobe.report.phrases import inside
from tensorprobe.text import counted, in_columns, plain, shell

_HEADLINES = {"nan": "FIRST NAN", "inf": "FIRST INF", "saturated": "FIRST SATURATION", "flagged": "FIRST OVERFLOW"}
_DIVIDES = {"div", "div_", "divide", "true_divide", "floor_divide", "remainder", "fmod", "reciprocal", "rsqrt"}
"""Ops that divide by their second input, or by their only one."""
_LOGS = {"log", "log2", "log10"}
_MARGIN = " " * 11
_SHOWN_BEFORE = 5
_FAR = 1e6
"""An input this many times below the limit of its dtype is too small to cause the overflow."""


def render_overflow(report: OverflowReport, *, limit: int = 10) -> str:
    """Return the report as text, with at most `limit` entries per list, and how many more there are."""
    lines = [f"{headline(report)} {verdict(report)}"]
    if report.first_nonfinite:
        lines += ["", *_first(report.first_nonfinite[0])]
        lines += _table(report.first_nonfinite[1:], limit, "in causal order")
    for arrival in report.arrivals[:limit]:
        lines += ["", *_arrival(arrival)]
    lines += _near(report.near, limit)
    lines += _counts(report, limit)
    return "\n".join(lines)


def headline(report: OverflowReport) -> str:
    """Return `FIRST INF` or the like, `NOT FINITE:`, `FINITE:` or, when nothing could be checked, `CANNOT CHECK:`."""
    if report.exit_code == 2:
        return "CANNOT CHECK:"
    if report.first_nonfinite:
        return _HEADLINES[report.first_nonfinite[0].kind]
    return "NOT FINITE:" if report.arrivals else "FINITE:"


def verdict(report: OverflowReport) -> str:
    """Return the sentence after the headline."""
    calls = counted(report.calls, "call")
    if report.first_nonfinite:
        return _sentence(report.first_nonfinite[0])
    if report.arrivals:
        first = report.arrivals[0]
        return f"{_what(first)} of {plain(first.call)} was not finite before any recorded call made a NaN or inf"
    if report.exit_code == 2:
        return "no call was checked"
    masks = "; all infinities are intentional (masks)" if report.intended else ""
    return f"no unexpected NaN or inf in {calls}{masks}"


def _sentence(first: FirstNonfinite) -> str:
    return f"in {plain(first.call)}{inside(first.module)}, step {first.step}, rank {first.rank}"


def _first(first: FirstNonfinite) -> list[str]:
    lines = [f"{'line':<11}{_frame(frame)}" for frame in first.frames[:1]]
    for output in first.outputs:
        lines.append(f"{'output':<11}{_output(output, first)}")
    for number, extent in enumerate(first.inputs):
        lines.append(f"{'input' if not number else '':<11}{_extent(extent, first)}")
    for number, extent in enumerate(first.forward):
        lines.append(f"{'forward' if not number else '':<11}{_extent(extent, first)}")
    lines.append(f"{'verdict':<11}{first.verdict}: {plain(first.reason)}")
    if first.chain:
        lines.append(f"{'made by':<11}{' <- '.join(plain(name) for name in first.chain)}")
    for number, line in enumerate(first.before[-_SHOWN_BEFORE:]):
        lines.append(f"{'before' if not number else '':<11}{plain(line)}")
    lines.append(f"{'spread to':<11}{_spread(first.spread, first.spread_count)}")
    if first.note:
        lines.append(f"{'note':<11}{plain(first.note)}")
    if first.script:
        lines.append(f"{'replay':<11}python {shell(first.script)}")
    return lines


def _output(output: BadOutput, first: FirstNonfinite) -> str:
    counts = [f"{count:,} {word}" for count, word in ((output.nan, "NaN"), (output.inf, "inf")) if count]
    if first.kind == "saturated":
        counts = [f"{output.count:,} at the largest number of the dtype"]
    if first.kind == "flagged":
        counts = ["all finite; the device's overflow register was set"]
    places = f", first at {', '.join(map(str, output.first[:3]))}" if output.first else ""
    return f"{plain(output.slot)} {_tensor(output.dtype, output.shape)}: {', '.join(counts)} of {output.elements:,}{places}"


def _zeros(extent: Extent, first: FirstNonfinite) -> str:
    """Return what a zero in this input does to the call; nothing when there is none, or it does no harm."""
    op = first.op.rpartition(".")[2]
    if 0.0 not in (extent.min, extent.max) or first.direction != "forward":
        return ""
    if op in _LOGS:
        return ", contains zeros: logarithm of zero"
    divisor = extent.slot != "input.0" or op in ("reciprocal", "rsqrt")
    return ", contains zeros: division by zero" if op in _DIVIDES and divisor else ""


def _extent(extent: Extent, first: FirstNonfinite) -> str:
    if math.isnan(extent.min) and not extent.nan:
        reach = "finite" if math.isnan(extent.max) else f"up to {extent.max:.4g} in magnitude"
        reach += " (overwritten by the call)"
    else:
        reach = f"{extent.min:.4g} to {extent.max:.4g}"
    masked = f", {extent.inf:,} intentionally infinite" if extent.inf else ""
    near = math.isfinite(extent.margin) and extent.margin < _FAR
    margin = _zeros(extent, first) or (f", {extent.margin:.3g} times below the limit" if near else "")
    maker = f", from {plain(extent.producer)}" if extent.producer else ""
    here = f", {extent.here + 0.0:.4g} at {first.outputs[0].first[0]}" if extent.here is not None else ""
    return f"{plain(extent.slot)} {_tensor(extent.dtype, extent.shape)}: {reach}{here}{masked}{margin}{maker}"


def _tensor(dtype: str, shape: Sequence[int]) -> str:
    return f"{plain(dtype)} [{', '.join(map(str, shape))}]"


def _spread(names: Sequence[str], count: int) -> str:
    if not count:
        return "no other call"
    shown = ", ".join(plain(name) for name in names[:3])
    return f"{counted(count, 'call')}: {shown}" + (", …" if count > 3 else "")


def _table(first_nonfinite: Sequence[FirstNonfinite], limit: int, title: str) -> list[str]:
    if not first_nonfinite:
        return []
    rows = [
        (
            str(first.step),
            str(first.rank),
            first.kind,
            plain(first.call),
            plain(first.module),
            first.verdict,
            _line(first.frames),
        )
        for first in first_nonfinite[:limit]
    ]
    lines = ["", f"{counted(len(first_nonfinite), 'more call')} with a new NaN or inf ({title}):"]
    lines += in_columns([("step", "rank", "kind", "call", "module", "verdict", "line"), *rows])
    if len(first_nonfinite) > limit:
        lines.append(f"  and {len(first_nonfinite) - limit:,} more: --limit {len(first_nonfinite) + 1}")
    return lines


def _arrival(arrival: Arrival) -> list[str]:
    counts = [f"{count:,} {word}" for count, word in ((arrival.nan, "NaN"), (arrival.inf, "inf")) if count]
    lines = [
        f"{'not finite':<11}{_what(arrival)}: {', '.join(counts)} in {_tensor(arrival.dtype, arrival.shape)}, first used by "
        f"{plain(arrival.call)}{inside(arrival.module)} ({plain(arrival.slot)}), step {arrival.step}, rank {arrival.rank}"
    ]
    lines += [f"{'line':<11}{_frame(frame)}" for frame in arrival.frames[:1]]
    lines.append(f"{'spread to':<11}{_spread(arrival.spread, arrival.spread_count)}")
    return lines


def _what(arrival: Arrival) -> str:
    if arrival.what == Arrived.GRADIENT:
        return "a gradient that no recorded call made (autograd sums the gradients of a tensor that is used twice)"
    known: dict[str, str] = {
        Arrived.INPUT: "an input",
        Arrived.PARAMETER: "a parameter",
        Arrived.NUMBER: "a number in the program",
        Arrived.OTHER_RANK: "something from another rank",
    }
    return known.get(arrival.what, plain(arrival.what))


def _near(near: Iterable[NearLimit], limit: int) -> list[str]:
    ordered = sorted(near, key=lambda each: each.limit / each.greatest)
    if not ordered:
        return []
    rows = [("largest", "limit", "dtype", "call", "module", "times")]
    for each in ordered[:limit]:
        rows.append(
            (
                f"{each.greatest:.4g}",
                f"{each.limit:.5g}",
                plain(each.dtype),
                plain(each.call),
                plain(each.module),
                f"{each.times:,}",
            )
        )
    return ["", f"near the limit ({counted(len(ordered), 'op')}):", *in_columns(rows)]


def _counts(report: OverflowReport, limit: int) -> list[str]:
    ranks = f"{'rank' if len(report.ranks) == 1 else 'ranks'} {', '.join(map(str, report.ranks))}"
    lines = ["", f"{counted(report.calls, 'call')} checked on {ranks}"]
    if report.intended:
        ops = ", ".join(f"{plain(op)} {count:,}" for op, count in list(report.intended.items())[:limit])
        lines.append(f"intentional, not reported: {ops}")
    if report.skipped_by_scaler:
        names = ", ".join(plain(name) for name in report.skipped_by_scaler[:3])
        lines.append(
            f"overflows in steps that a GradScaler skipped, not reported: {len(report.skipped_by_scaler):,} ({names})"
        )
    if report.left_out:
        lines.append(f"{counted(report.left_out, 'more finding')} not kept")
    for rank, last in report.last_calls.items():
        lines.append(f"rank {rank} did not finish; its last calls:")
        lines += [f"  {plain(line)}" for line in last[-limit:]]
    lines += [f"note: {plain(note)}" for note in report.notes[:limit]]
    return lines


def _line(frames: Sequence[Frame]) -> str:
    return f"{plain(frames[0].file)}:{frames[0].line}" if frames else ""


def _frame(frame: Frame) -> str:
    return f"{plain(frame.file)}:{frame.line} in {plain(frame.function)}: {plain(frame.code)}"

"""What an overflow watch and `tensorprobe overflow` print: the first bad call, what led to it, what it spread to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tensorprobe.model.call import Frame
from tensorprobe.model.overflow import Arrival, Birth, Born, Extent, NearLimit, OverflowReport
from tensorprobe.report.wording import inside
from tensorprobe.text import counted, plain, shell

_HEADLINES = {"nan": "FIRST NAN", "inf": "FIRST INF", "saturated": "FIRST SATURATION", "flagged": "FIRST OVERFLOW"}
_DIVIDES = {"div", "div_", "divide", "true_divide", "floor_divide", "remainder", "fmod", "reciprocal", "rsqrt"}
"""Ops that divide by their second input, or by their only one."""
_LOGS = {"log", "log2", "log10"}
_MARGIN = " " * 11
_SHOWN_BEFORE = 5
_FAR = 1e6
"""An input that is this much smaller than the limit of its dtype did not overflow by its size."""


def render_overflow(report: OverflowReport, *, limit: int = 10) -> str:
    """The whole answer as text; of each list at most `limit` entries, and how many more there are."""
    lines = [f"{headline(report)} {verdict(report)}"]
    if report.births:
        lines += ["", *_first(report.births[0])]
        lines += _table(report.births[1:], limit, "in causal order")
    for arrival in report.arrivals[:limit]:
        lines += ["", *_arrival(arrival)]
    lines += _near(report.near, limit)
    lines += _counts(report, limit)
    return "\n".join(lines)


def headline(report: OverflowReport) -> str:
    """Return `FIRST INF` or the like, `NOT FINITE:`, `FINITE:` or, when nothing could be checked, `CANNOT CHECK:`."""
    if report.exit_code == 2:
        return "CANNOT CHECK:"
    if report.births:
        return _HEADLINES[report.births[0].kind]
    return "NOT FINITE:" if report.arrivals else "FINITE:"


def verdict(report: OverflowReport) -> str:
    """What follows the headline: one sentence."""
    calls = counted(report.calls, "call")
    if report.births:
        return _sentence(report.births[0])
    if report.arrivals:
        first = report.arrivals[0]
        return f"{_what(first)} of {plain(first.call)} was not finite before any recorded call made a NaN or inf"
    if report.exit_code == 2:
        return "no call was checked"
    masks = "; all infinities are intentional (masks)" if report.intended else ""
    return f"no unexpected NaN or inf in {calls}{masks}"


def _sentence(birth: Birth) -> str:
    return f"in {plain(birth.call)}{inside(birth.module)}, step {birth.step}, rank {birth.rank}"


def _first(birth: Birth) -> list[str]:
    lines = [f"{'line':<11}{_frame(frame)}" for frame in birth.frames[:1]]
    for born in birth.outputs:
        lines.append(f"{'output':<11}{_born(born, birth)}")
    for number, extent in enumerate(birth.inputs):
        lines.append(f"{'input' if not number else '':<11}{_extent(extent, birth)}")
    lines.append(f"{'verdict':<11}{birth.verdict}: {plain(birth.reason)}")
    if birth.chain:
        lines.append(f"{'made by':<11}{' <- '.join(plain(name) for name in birth.chain)}")
    for number, line in enumerate(birth.before[-_SHOWN_BEFORE:]):
        lines.append(f"{'before' if not number else '':<11}{plain(line)}")
    lines.append(f"{'spread to':<11}{_spread(birth.spread, birth.spread_count)}")
    if birth.note:
        lines.append(f"{'note':<11}{plain(birth.note)}")
    if birth.script:
        lines.append(f"{'replay':<11}python {shell(birth.script)}")
    return lines


def _born(born: Born, birth: Birth) -> str:
    counts = [f"{count:,} {word}" for count, word in ((born.nan, "NaN"), (born.inf, "inf")) if count]
    if birth.kind == "saturated":
        counts = [f"{born.count:,} at the largest number of the dtype"]
    if birth.kind == "flagged":
        counts = ["all finite; the device's overflow register was set"]
    first = f", first at {', '.join(map(str, born.first[:3]))}" if born.first else ""
    return f"{plain(born.slot)} {_tensor(born.dtype, born.shape)}: {', '.join(counts)} of {born.elements:,}{first}"


def _zeros(extent: Extent, birth: Birth) -> str:
    """Return what a zero in this input does to the call; nothing when there is none, or it does no harm."""
    op = birth.op.rpartition(".")[2]
    if 0.0 not in (extent.min, extent.max) or birth.direction != "forward":
        return ""
    if op in _LOGS:
        return ", contains zeros: logarithm of zero"
    divisor = extent.slot != "input.0" or op in ("reciprocal", "rsqrt")
    return ", contains zeros: division by zero" if op in _DIVIDES and divisor else ""


def _extent(extent: Extent, birth: Birth) -> str:
    if math.isnan(extent.min) and not extent.nan:
        reach = "finite" if math.isnan(extent.max) else f"up to {extent.max:.4g} in magnitude"
        reach += " (overwritten by the call)"
    else:
        reach = f"{extent.min:.4g} to {extent.max:.4g}"
    masked = f", {extent.inf:,} intentionally infinite" if extent.inf else ""
    near = math.isfinite(extent.margin) and extent.margin < _FAR
    margin = _zeros(extent, birth) or (f", {extent.margin:.3g} times below the limit" if near else "")
    maker = f", from {plain(extent.producer)}" if extent.producer else ""
    return f"{plain(extent.slot)} {_tensor(extent.dtype, extent.shape)}: {reach}{masked}{margin}{maker}"


def _tensor(dtype: str, shape: Sequence[int]) -> str:
    return f"{plain(dtype)} [{', '.join(map(str, shape))}]"


def _spread(names: Sequence[str], count: int) -> str:
    if not count:
        return "no other call"
    shown = ", ".join(plain(name) for name in names[:3])
    return f"{counted(count, 'call')}: {shown}" + (", …" if count > 3 else "")


def _table(births: Sequence[Birth], limit: int, title: str) -> list[str]:
    if not births:
        return []
    rows = [
        (
            str(birth.step),
            str(birth.rank),
            birth.kind,
            plain(birth.call),
            plain(birth.module),
            birth.verdict,
            _line(birth.frames),
        )
        for birth in births[:limit]
    ]
    lines = ["", f"{counted(len(births), 'more call')} with a new NaN or inf ({title}):"]
    lines += _columns([("step", "rank", "kind", "call", "module", "verdict", "line"), *rows])
    if len(births) > limit:
        lines.append(f"  and {len(births) - limit:,} more: --limit {len(births) + 1}")
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


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
    if arrival.what == "gradient":
        return "a gradient that no recorded call made (autograd sums the gradients of a tensor that is used twice)"
    known = {
        "input": "an input",
        "parameter": "a parameter",
        "number": "a number in the program",
        "from another rank": "something from another rank",
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
    return ["", f"near the limit ({counted(len(ordered), 'op')}):", *_columns(rows)]


def _counts(report: OverflowReport, limit: int) -> list[str]:
    lines = ["", f"{counted(report.calls, 'call')} checked on rank {', '.join(map(str, report.ranks))}"]
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

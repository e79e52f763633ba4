"""What an overflow watch and `tensorprobe overflow` print: the birthplace first, what led to it, what came of it, what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence

from tensorprobe.model.call import Frame
from tensorprobe.model.overflow import Arrival, Birth, Born, Extent, NearLimit, OverflowReport
from tensorprobe.text import counted, plain

_HEADLINES = {"nan": "FIRST NAN", "inf": "FIRST INF", "saturated": "SATURATED", "flagged": "OVERFLOW"}
_MARGIN = " " * 11
_SHOWN_BEFORE = 5


def render_overflow(report: OverflowReport, *, limit: int = 10) -> str:
    """The whole answer as text; of each list at most `limit` entries, and how many more there are."""
    lines = [f"{headline(report):<9}  {verdict(report)}"]
    if report.births:
        lines += ["", *_first(report.births[0])]
        lines += _table(report.births[1:], limit, "later calls that made NaN or inf, in causal order")
    for arrival in report.arrivals[:limit]:
        lines += ["", *_arrival(arrival)]
    lines += _near(report.near, limit)
    lines += _counts(report, limit)
    return "\n".join(lines)


def headline(report: OverflowReport) -> str:
    """Return `FIRST INF`, `FIRST NAN`, `SATURATED`, `OVERFLOW`, `CAME IN`, `FINITE` or, if no call could be looked at, `CANNOT SAY`."""
    if report.exit_code == 2:
        return "CANNOT SAY"
    if report.births:
        return _HEADLINES[report.births[0].kind]
    return "CAME IN" if report.arrivals else "FINITE"


def verdict(report: OverflowReport) -> str:
    """What follows the headline: one sentence."""
    calls = counted(report.calls, "call")
    if report.births:
        return _sentence(report.births[0])
    if report.arrivals:
        first = report.arrivals[0]
        return f"no call made a NaN or inf; {_what(first)} already had one when it came into {plain(first.call)}"
    if report.exit_code == 2:
        return "no call could be looked at"
    intended = "; all infinities are intentional (masks)" if report.intended else ""
    return f"no unexpected NaN or inf in {calls}{intended}"


def _sentence(birth: Birth) -> str:
    inside = f" in {plain(birth.module)}" if birth.module else ""
    return f"in {plain(birth.call)}{inside}, step {birth.step}, rank {birth.rank}"


def _first(birth: Birth) -> list[str]:
    lines = [f"{'line':<11}{_frame(frame)}" for frame in birth.frames[:1]]
    for born in birth.outputs:
        lines.append(f"{'gave':<11}{_born(born, birth)}")
    for number, extent in enumerate(birth.inputs):
        lines.append(f"{'out of' if not number else '':<11}{_extent(extent)}")
    lines.append(f"{'verdict':<11}{birth.verdict}: {plain(birth.reason)}")
    if birth.chain:
        lines.append(f"{'made by':<11}{' <- '.join(plain(name) for name in birth.chain)}")
    for number, line in enumerate(birth.before[-_SHOWN_BEFORE:]):
        lines.append(f"{'before' if not number else '':<11}{plain(line)}")
    lines.append(f"{'spread to':<11}{_spread(birth.spread, birth.spread_count)}")
    if birth.note:
        lines.append(f"{'note':<11}{plain(birth.note)}")
    if birth.script:
        lines.append(f"{'run it':<11}python {shlex.quote(plain(birth.script))}")
    return lines


def _born(born: Born, birth: Birth) -> str:
    counts = [f"{count:,} {word}" for count, word in ((born.nan, "NaN"), (born.inf, "infinite")) if count]
    if birth.kind == "saturated":
        counts = [f"{born.count:,} at the greatest number of the dtype"]
    if birth.kind == "flagged":
        counts = ["all finite; the device's overflow register was set"]
    first = f", first at {', '.join(map(str, born.first[:3]))}" if born.first else ""
    return f"{plain(born.slot)} {_tensor(born.dtype, born.shape)}: {', '.join(counts)} of {born.elements:,}{first}"


def _extent(extent: Extent) -> str:
    if math.isnan(extent.min) and not extent.nan:
        reach = "finite" if math.isnan(extent.max) else f"up to {extent.max:.4g} in magnitude"
        reach += " (overwritten by the call)"
    else:
        reach = f"{extent.min:.4g} to {extent.max:.4g}"
    masked = f", {extent.inf:,} infinite on purpose" if extent.inf else ""
    margin = f", {extent.margin:.3g} times below the limit" if math.isfinite(extent.margin) else ""
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
    lines = ["", f"{counted(len(births), 'more birth')} ({title}):"]
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
    counts = [f"{count:,} {word}" for count, word in ((arrival.nan, "NaN"), (arrival.inf, "infinite")) if count]
    inside = f" in {plain(arrival.module)}" if arrival.module else ""
    lines = [
        f"{'came in':<11}{_what(arrival)}: {', '.join(counts)} in {_tensor(arrival.dtype, arrival.shape)}, first met by "
        f"{plain(arrival.call)}{inside} ({plain(arrival.slot)}), step {arrival.step}, rank {arrival.rank}"
    ]
    lines += [f"{'line':<11}{_frame(frame)}" for frame in arrival.frames[:1]]
    lines.append(f"{'spread to':<11}{_spread(arrival.spread, arrival.spread_count)}")
    return lines


def _what(arrival: Arrival) -> str:
    if arrival.what == "gradient":
        return "a gradient that no watched call has made (the engine adds up gradients of a tensor that is used twice)"
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
    rows = [("greatest", "of", "dtype", "call", "module", "times")]
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
    lines = ["", f"{counted(report.calls, 'call')} of rank {', '.join(map(str, report.ranks))} looked at"]
    if report.intended:
        ops = ", ".join(f"{plain(op)} {count:,}" for op, count in list(report.intended.items())[:limit])
        lines.append(f"meant, and not blamed: {ops}")
    if report.skipped_by_scaler:
        names = ", ".join(plain(name) for name in report.skipped_by_scaler[:3])
        lines.append(f"in steps that a GradScaler skipped, not counted: {len(report.skipped_by_scaler):,} ({names})")
    if report.left_out:
        lines.append(f"{counted(report.left_out, 'finding')} more not kept")
    for rank, last in report.last_calls.items():
        lines.append(f"rank {rank} did not come to its end; its last calls:")
        lines += [f"  {plain(line)}" for line in last[-limit:]]
    lines += [f"note: {plain(note)}" for note in report.notes[:limit]]
    return lines


def _line(frames: Sequence[Frame]) -> str:
    return f"{plain(frames[0].file)}:{frames[0].line}" if frames else ""


def _frame(frame: Frame) -> str:
    return f"{plain(frame.file)}:{frame.line} in {plain(frame.function)}: {plain(frame.code)}"

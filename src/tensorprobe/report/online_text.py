"""The text report of an online compare: the answer first, then the counts, then the next command."""

from __future__ import annotations

from tensorprobe.model.online import WITHOUT_NUMBERS, OnlineResult, OnlineRow
from tensorprobe.text import plain

_MOST_OPS, _MOST_FRAMES = 5, 3


def failure_line(row: OnlineRow) -> str:
    """Return one line for a failing call."""
    if row.message:
        what = row.message
    else:
        what = f"{row.judged_by} {row.measured:.3g}, allowed {row.allowed:.3g}"
    return f"Failed {plain(row.call)} {plain(row.slot)} ({_kind(row)}): {what}; {_where(row)}"


def render_online(result: OnlineResult, *, folder: str | None = None, limit: int = 10) -> str:
    """Return the report."""
    lines = [*_answer(result), "", *_counts(result)]
    if result.chained:
        lines += ["", *_chain(result)]
    if result.failed:
        lines += ["", "The ops that failed, and how many of their calls:"]
        failed = {op: count for op, count in result.ops.items() if count.failed}
        for op, count in sorted(failed.items(), key=lambda entry: -entry[1].failed)[:limit]:
            lines.append(f"  {op:40}  {count.failed:,} of {count.compared:,}")
        saved = next((row.saved for row in result.failures if row.saved), "")
        if saved:
            lines += ["", f"Next: python {saved}/replay.py"]
    elif folder is not None:
        lines += ["", f"All counts: {plain(folder)}/online.json"]
    return "\n".join(lines)


def _unchecked(result: OnlineResult) -> str:
    """`; 3 not compared: random`: calls that compute numbers, with the main reason."""
    reasons = {reason: sum(ops.values()) for reason, ops in result.skipped.items() if reason not in WITHOUT_NUMBERS}
    if not reasons:
        return ""
    return f"; {sum(reasons.values()):,} not compared: {plain(max(reasons, key=reasons.__getitem__))}"


def _answer(result: OnlineResult) -> list[str]:
    steps = f"{len(result.steps)} step{'s' if len(result.steps) != 1 else ''}"
    if not result.compared:
        return [f"NOTHING COMPARED: {result.seen:,} ATen calls were seen, and none could be compared."]
    if not result.failed:
        return [
            f"AGREES: {result.compared:,} ATen calls in {steps} agree with the reference "
            f"({result.reference}, {result.policy}){_unchecked(result)}."
        ]
    lines = [
        f"FAILED: {result.failed:,} of {result.compared:,} compared ATen calls in {steps} "
        f"({result.reference}, {result.policy})."
    ]
    if result.failures:
        first = result.failures[0]
        lines += ["", f"First: {first.call} {first.slot}, step {first.step}"]
        what = first.message or f"{first.judged_by} {first.measured:.3g}, allowed {first.allowed:.3g}"
        lines.append(f"  {what} ({_kind(first)} against {first.reference or 'its definition'})")
        lines.append(f"  in {_where(first)}")
        lines += [f"    {plain(frame)}" for frame in first.stack[:_MOST_FRAMES]]
        lines.append("  Its inputs were the same on both sides: the call introduced the error.")
        if first.accumulated is not None:
            lines.append(
                f"  accumulated error of its result {first.accumulated:.3g}, of its inputs {first.inherited or 0.0:.3g}"
            )
    return lines


def _counts(result: OnlineResult) -> list[str]:
    lines = [f"{result.seen:,} calls seen: {result.compared:,} compared"]
    others = {
        "not sampled": result.unsampled,
        "not selected": result.filtered,
        "with an error inside the tool": result.broken,
    }
    lines[0] += "".join(f", {count:,} {what}" for what, count in others.items() if count)
    for reason, ops in sorted(result.skipped.items(), key=lambda entry: -sum(entry[1].values())):
        most = sorted(ops, key=lambda op: -ops[op])
        more = f" and {len(most) - _MOST_OPS} more ops" if len(most) > _MOST_OPS else ""
        names = ", ".join(op.removeprefix("Aten.") for op in most[:_MOST_OPS])
        lines.append(f"  {sum(ops.values()):,} not compared, {reason}: {names}{more}")
    if result.first_error:
        lines.append(f"  first error inside the tool: {plain(result.first_error)}")
    for what, count in result.blind_spots.items():
        lines.append(f"  not seen: {what}" + (f" ({count:,} times)" if count > 1 else ""))
    if result.healed:
        lines.append(f"  {result.healed:,} results were replaced by the reference's (heal)")
    if result.stopped:
        lines.append("  training was stopped (stop_after)")
    return lines


def _chain(result: OnlineResult) -> list[str]:
    lines = [f"Compared with a chain computed on the CPU only ({result.chained:,} calls), the error grew most in:"]
    for row in result.diverged:
        grew = f"{row.inherited or 0.0:.2g} → {row.accumulated or 0.0:.2g}"
        lines.append(f"  {grew:20}  {row.call} in {_where(row)}")
    if result.reseeded:
        lines.append(
            f"  values changed outside of recorded calls and were copied from the device again, {result.reseeded:,} times"
        )
    return lines


def _kind(row: OnlineRow) -> str:
    return f"{row.dtype}[{', '.join(map(str, row.shape))}]"


def _where(row: OnlineRow) -> str:
    """Return the API call, the module and the user's line."""
    parts = [part for part in (row.api, row.module and f"module {row.module}") if part]
    if row.stack:
        parts.append(row.stack[0].replace('File "', "").replace('", line ', ":"))
    return plain(", ".join(parts)) if parts else "code outside of all recorded API calls"

"""The pages of a precheck and of an audit: every call that was checked alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tensorprobe.model.diff import CallEvidence
from tensorprobe.model.precheck import Audit, CallCheck, Checked, Precheck
from tensorprobe.report import audit_text, precheck_text
from tensorprobe.report.page.data import (
    MOST_ROWS,
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
from tensorprobe.text import shell

STATUSES: dict[str, Tone] = {"pass": "good", "skip": "quiet", "fail": "bad"}
_TONES: dict[str, Tone] = {"PASSED": "good", "FAILED": "bad"}
_KINDS = WORDS | {
    "measured": "error", "allowed": "error", "relative_l2": "error", "max_abs": "error", "max_rel": "error", "one_minus_cosine": "error",
    "ulp_max": "count", "different": "count", "nonfinite_different": "count", "own": "error",
}  # fmt: skip


def checks_page(
    summary: Precheck, evidence: Sequence[CallEvidence] = (), *, full: bool = False, source: bool = True
) -> Page:
    """Return the page of a precheck or an audit. `evidence` holds lines of the program around failing calls."""
    if not source:
        summary, evidence = _without_paths(summary), []
    audit = isinstance(summary, Audit)
    kept = summary.checks if full else _kept(summary)
    calls, rows = [], []
    for check in kept:
        for direction in ("forward", "backward"):
            details = [one for one in check.details if one.direction == direction]
            if details or (direction == "forward" and not check.details):
                rows += [_row(one) for one in details] or [_without_figures(check)]
                calls.append(_call(check, direction, details))
    failing = next((check for check in kept if _fails(check)), None)
    headline = precheck_text.headline(summary)
    counts = ("fail", summary.failed), ("skip", summary.skipped), ("pass", summary.passed)
    sentence = audit_text.verdict(summary) if isinstance(summary, Audit) else precheck_text.verdict(summary)
    return Page(
        kind="audit" if audit else "precheck",
        tool=summary.tool,
        title=summary.run if source else "",
        verdict=Verdict(tone=_TONES.get(headline, "quiet"), headline=headline, sentence=sentence, lines=[sentence]),
        first=None if failing is None else _first(failing),
        counts={status: count for status, count in counts if count},
        total_calls=summary.calls,
        sides=_sides(summary, audit),
        commands=_commands(summary, failing, audit) if source else [],
        notes=summary.notes,
        items=[*_reasons(summary), *_losses(summary)],
        items_total=len(summary.reasons) + len(getattr(summary, "losses", [])),
        evidence=list(evidence),
        measure="relative_l2",
        **listed(calls, rows, statuses=STATUSES, kinds=_KINDS),
        selected=next((at for at, call in enumerate(calls) if call.status == "fail"), -1),
        left_out=f"{len(kept):,} of {len(summary.checks):,} checks are in this file."
        if len(kept) < len(summary.checks)
        else "",
        source=source,
    )


def _kept(summary: Precheck) -> list[CallCheck]:
    """Return the checks that fit, those that fail first, in the order of the record."""
    if sum(len(check.details) + 1 for check in summary.checks) <= MOST_ROWS:
        return summary.checks
    room, chosen = MOST_ROWS, set()
    for at in sorted(range(len(summary.checks)), key=lambda at: not _fails(summary.checks[at])):
        room -= len(summary.checks[at].details) + 1
        if room < 0:
            break
        chosen.add(at)
    return [check for at, check in enumerate(summary.checks) if at in chosen]


def _fails(check: CallCheck) -> bool:
    return "fail" in (check.forward, check.backward)


def _row(one: Checked) -> dict[str, object]:
    return {
        **{name: getattr(one, name) for name in _KINDS if hasattr(one, name)},
        "slot": f"{one.slot} ({one.variant})" if one.variant else one.slot,
        "side": "output",
        "dtype": one.device_dtype.removeprefix("torch."),
        "shape": str(one.shape),
        "verdict": one.result,
        "own": math.nan if one.own_relative_l2 is None else one.own_relative_l2,
    }


def _without_figures(check: CallCheck) -> dict[str, object]:
    nothing = {name: "" if kind == "word" else math.nan for name, kind in _KINDS.items()}
    return {**nothing, "side": "output", "verdict": check.forward, "message": check.message}


def _call(check: CallCheck, direction: str, details: list[Checked]) -> CallRow:
    worst = max(details, key=lambda one: one.relative_l2, default=None)
    limited = [one.allowed for one in details if one.judged_by == "relative_l2"]
    return CallRow(
        name=check.call if direction == "forward" else check.call.replace(".forward", ".backward"),
        status=check.forward if direction == "forward" else check.backward,
        rows=max(1, len(details)),
        step=check.step,
        rank=check.rank,
        line=check.line,
        module=check.module,
        direction=direction,
        error=math.nan if worst is None else worst.relative_l2,
        limit=max(limited, default=math.nan),
    )


def _first(check: CallCheck) -> First:
    wrong = next((one for one in check.details if one.result == "fail"), None)
    facts = {} if wrong is None else {**judged(wrong), "dtype": wrong.device_dtype.removeprefix("torch.")}
    return First(
        step=check.step,
        rank=check.rank,
        index=check.line,
        call=check.call,
        module=check.module,
        status="fail",
        message=check.message if wrong is None else "",
        source=check.source,
        **facts,
    )


def _sides(summary: Precheck, audit: bool) -> list[Side]:
    run = Side(role="run", path=summary.run, facts=[f"standard {summary.standard}"])
    if audit:
        return [run, Side(role="reference", path="", facts=["float64 from the recorded inputs"])]
    return [
        run,
        Side(role="device", path=summary.device, facts=[f"{summary.data} data"]),
        Side(role="reference", path="cpu", facts=["in higher precision"]),
    ]


def _commands(summary: Precheck, failing: CallCheck | None, audit: bool) -> list[Command]:
    if failing is None:
        return []
    where = f"--steps {failing.step} --ranks {failing.rank}"
    call = f"{shell(summary.run)} --call {shell(failing.call)} {where} --save-failures -o replayed"
    command = f"tensorprobe audit {call}" if audit else f"tensorprobe precheck {call} --device {shell(summary.device)}"
    look = f"tensorprobe inspect {shell(summary.run)} {shell(failing.call)} --step {failing.step} --rank {failing.rank}"
    return [Command(key="inspect", text=look), Command(key="replay", text=command)]


def _reasons(summary: Precheck) -> list[Item]:
    return [Item(kind="reason", call=f"{count:,}", detail=reason) for reason, count in summary.reasons.items()]


def _losses(summary: Precheck) -> list[Item]:
    losses = summary.losses if isinstance(summary, Audit) else []
    return [
        Item(
            kind="loss", call=loss.name, module=loss.module, detail=f"{loss.error:.3g} eps of {loss.dtype}, {loss.kind}"
        )
        for loss in losses
    ]


def _without_paths(summary: Precheck) -> Precheck:
    checks = [msgspec.structs.replace(check, source=None) for check in summary.checks]
    notes = [note for note in summary.notes if "/" not in note]
    return msgspec.structs.replace(summary, run="run", output=None, checks=checks, notes=notes)

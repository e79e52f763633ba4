"""From outcomes to the answer: counts that add up, and the result for Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from tensorprobe.checks.plan import Finished, Plan
from tensorprobe.checks.settings import Asked
from tensorprobe.model.diff import CallEvidence
from tensorprobe.model.dtypes import EPS
from tensorprobe.model.precheck import Audit, CallCheck, Loss, Precheck
from tensorprobe.ops.table import plain_name
from tensorprobe.record.source import source_lines
from tensorprobe.report.forms import Answer
from tensorprobe.text import counted
from tensorprobe.version import VERSION

SCHEMA_VERSION = 1
_MOST_EVIDENCE = 24


class PrecheckResult(Answer):
    """What `tensorprobe.precheck` returns. `print(result)` shows what the command shows."""

    summary: Precheck

    def __init__(
        self,
        summary: Precheck,
        *,
        replays: Mapping[str, str] | None = None,
        evidence: Sequence[CallEvidence] | None = None,
    ) -> None:
        self.replays = dict(replays or {})
        """Name of a failing call → the script that runs it alone; of those that were saved."""
        self.evidence = list(_evidence_of(summary) if evidence is None else evidence)
        """The lines of the program around failing calls, for the page."""
        super().__init__(summary, replays=self.replays)

    @property
    def checks(self) -> list[CallCheck]:
        """Every distinct call, in the order of the record."""
        return self.summary.checks

    @property
    def failures(self) -> list[CallCheck]:
        """The distinct calls that fail, forward or backward."""
        return [check for check in self.summary.checks if "fail" in (check.forward, check.backward)]

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        return bool(self)

    def __repr__(self) -> str:
        summary = self.summary
        kind = type(self).__name__.removesuffix("Result").lower()
        return f"<{kind}: {summary.passed:,} passed, {summary.failed:,} failed, {summary.skipped:,} skipped>"


class AuditResult(PrecheckResult):
    """What `tensorprobe.audit` returns. `print(result)` shows what the command shows."""

    summary: Audit


def _evidence_of(summary: Precheck) -> Iterator[CallEvidence]:
    """Yield the lines of the program around the first calls that fail."""
    failing = (check for check in summary.checks if check.source and "fail" in (check.forward, check.backward))
    for check in islice(failing, _MOST_EVIDENCE):
        assert check.source is not None
        yield CallEvidence(
            step=check.step,
            rank=check.rank,
            index=check.line,
            call=check.call,
            candidate_call=check.call,
            module=check.module,
            source=source_lines(check.source),
        )


def conclude(
    plan: Plan,
    outcomes: Mapping[int, Finished],
    asked: Asked,
    *,
    run: str,
    output: str | None,
    elapsed_s: float,
) -> PrecheckResult:
    """The answer, from the outcome of every check of the plan by its number."""
    checks = [
        msgspec.structs.replace(
            outcomes[number].check, module=planned.module, source=planned.source, equal=planned.equal
        )
        for number, planned in enumerate(plan.checks)
    ]
    checks = explain_failures(checks)
    calls: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for check in checks:
        count = 1 + len(check.equal)
        verdict = _verdict(check)
        calls[verdict] += count
        backward[check.backward] += count
        if verdict == "skip":
            reasons[check.message] += count
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tool": VERSION,
        "run": run,
        "device": asked.device,
        "data": asked.data,
        "standard": asked.standard,
        "exit_code": 1 if calls["fail"] else 0 if calls["pass"] else 2,
        "calls": calls.total(),
        "distinct": len(checks),
        "passed": calls["pass"],
        "failed": calls["fail"],
        "skipped": calls["skip"],
        "reasons": dict(reasons.most_common()),
        "backward_passed": backward["pass"],
        "backward_failed": backward["fail"],
        "checks": checks,
        "output": output,
        "notes": [*plan.notes, *_other_data(checks, asked), *_troubles(outcomes)],
        "elapsed_s": elapsed_s,
    }
    replays = {one.check.call: one.replay for one in outcomes.values() if one.replay}
    if asked.recorded:
        return AuditResult(Audit(**facts, losses=rank_losses(checks)), replays=replays)
    return PrecheckResult(Precheck(**facts), replays=replays)


def explain_failures(checks: Sequence[CallCheck]) -> list[CallCheck]:
    """Return the checks. One that fails because an op inside it fails, as a call of its own and in the same dtype, says so."""
    wrong: dict[tuple[str, str], CallCheck] = {}
    for check in checks:
        for dtype in _failing_dtypes(check, "forward"):
            wrong.setdefault((plain_name(check.op).strip("_"), dtype), check)

    def culprit(check: CallCheck) -> CallCheck | None:
        own = plain_name(check.op).strip("_")
        inside = {name.partition("::")[2].strip("_") for name in check.inside} - {own}
        found = (
            wrong.get((name, dtype))
            for name in sorted(inside)
            for dtype in _failing_dtypes(check, "forward", "backward")
        )
        return next((one for one in found if one is not None), None)

    explained = []
    for check in checks:
        other = culprit(check)
        if other is not None and culprit(other) is None:
            name = plain_name(other.op)
            message = f"{check.message}; {name} runs inside it and fails alone ({other.call})"
            check = msgspec.structs.replace(check, because=other.call, message=message)
        explained.append(check)
    return explained


def _failing_dtypes(check: CallCheck, *directions: str) -> list[str]:
    rows = (one for one in check.details if one.result == "fail" and one.direction in directions and one.slot)
    return list(dict.fromkeys(one.device_dtype for one in rows))


LOSSES = 20
"""Calls and modules, each, in the list of where precision is lost."""
_HALF_OF_DIGITS = 0.5
"""A gradient of which the CPU in the same dtype gets fewer than this part of the digits right is zero but for rounding, and
its relative error means nothing."""


def rank_losses(checks: Sequence[CallCheck]) -> list[Loss]:
    """Return the calls and the modules that lose most, in units of the eps of their dtype, the worst first."""
    worst: dict[str, Loss] = {}
    for check in checks:
        loss = _loss(check)
        if loss is not None and (loss.name not in worst or worst[loss.name].error < loss.error):
            worst[loss.name] = loss
    calls = list(worst.values())
    modules: dict[str, list[Loss]] = {}
    for loss in calls:
        modules.setdefault(loss.module, []).append(loss)
    whole = [
        Loss(
            kind="module",
            name=name or "(no module)",
            error=math.sqrt(sum(loss.error**2 for loss in losses)),
            dtype=max(losses, key=lambda loss: loss.error).dtype,
            calls=len(losses),
        )
        for name, losses in modules.items()
    ]
    kinds = (sorted(each, key=lambda loss: -loss.error)[:LOSSES] for each in (whole, calls))
    return [loss for losses in kinds for loss in losses]


def _loss(check: CallCheck) -> Loss | None:
    errors = []
    for one in check.details:
        dtype = one.device_dtype.removeprefix("torch.")
        eps = EPS.get(dtype)
        if eps is None or not 0 < one.relative_l2 < math.inf:
            continue
        if one.direction == "forward" or one.result == "fail" or (one.own_relative_l2 or 0.0) < eps**_HALF_OF_DIGITS:
            errors.append((one.relative_l2 / eps, dtype))
    if not errors:
        return None
    error, dtype = max(errors)
    return Loss(kind="call", name=check.call, error=error, dtype=dtype, module=check.module)


def _verdict(check: CallCheck) -> str:
    """A call fails when a direction does, and passes when one passes and none fails."""
    directions = (check.forward, check.backward)
    return "fail" if "fail" in directions else "pass" if "pass" in directions else "skip"


def _other_data(checks: list[CallCheck], asked: Asked) -> list[str]:
    recorded = sum(1 + len(check.equal) for check in checks if check.data == "real")
    if asked.data == "real" or not recorded:
        return []
    return [f"{counted(recorded, 'call')} run with recorded data: random ones mean nothing to the op"]


def _troubles(outcomes: Mapping[int, Finished]) -> list[str]:
    troubles = [outcomes[number].trouble for number in sorted(outcomes) if outcomes[number].trouble]
    if not troubles:
        return []
    count = counted(len(troubles), "check")
    return [f"{count} in which tensorprobe itself failed; please report it. The first:\n{troubles[0].strip()}"]

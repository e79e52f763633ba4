"""From outcomes to the answer: counts that add up, and the result for Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from tensorprobe.checks.plan import Finished, Plan
from tensorprobe.checks.settings import PrecheckSettings
from tensorprobe.model.precheck import CallCheck, Precheck
from tensorprobe.report.forms import Answer
from tensorprobe.text import counted
from tensorprobe.version import VERSION

SCHEMA_VERSION = 1


class PrecheckResult(Answer):
    """What `tensorprobe.precheck` returns. `print(result)` shows what the command shows."""

    summary: Precheck

    def __init__(self, summary: Precheck, *, replays: Mapping[str, str] | None = None) -> None:
        self.replays = dict(replays or {})
        """Name of a failing call → the script that runs it alone; of those that were saved."""
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
        return f"<precheck: {summary.passed:,} passed, {summary.failed:,} failed, {summary.skipped:,} skipped>"


def conclude(
    plan: Plan,
    outcomes: Mapping[int, Finished],
    asked: PrecheckSettings,
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
    summary = Precheck(
        schema_version=SCHEMA_VERSION,
        tool=VERSION,
        run=run,
        device=asked.device,
        data=asked.data,
        standard=asked.standard,
        exit_code=1 if calls["fail"] else 0 if calls["pass"] else 2,
        calls=calls.total(),
        distinct=len(checks),
        passed=calls["pass"],
        failed=calls["fail"],
        skipped=calls["skip"],
        reasons=dict(reasons.most_common()),
        backward_passed=backward["pass"],
        backward_failed=backward["fail"],
        checks=checks,
        output=output,
        notes=[*plan.notes, *_other_data(checks, asked), *_troubles(outcomes)],
        elapsed_s=elapsed_s,
    )
    replays = {one.check.call: one.replay for one in outcomes.values() if one.replay}
    return PrecheckResult(summary, replays=replays)


def _verdict(check: CallCheck) -> str:
    """A call fails when a direction does, and passes when one passes and none fails."""
    directions = (check.forward, check.backward)
    return "fail" if "fail" in directions else "pass" if "pass" in directions else "skip"


def _other_data(checks: list[CallCheck], asked: PrecheckSettings) -> list[str]:
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

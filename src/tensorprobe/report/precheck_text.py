"""What `tensorprobe precheck` prints: the answer first, the failing ops under it, the counts, the next command last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorprobe.model.precheck import NO_DROPOUT, CallCheck, Checked, Precheck
from tensorprobe.report.phrases import figure, place_of
from tensorprobe.report.phrases import inside as inside_module
from tensorprobe.report.precheck_tables import RESULT_FILE
from tensorprobe.text import counted, few, plain, shell

_MARGIN = " " * 10
_MOST_CALLERS = 6


def render_precheck(precheck: Precheck, *, replays: Mapping[str, str] | None = None, limit: int = 10) -> str:
    """Return the result as text, with at most `limit` ops, reasons and notes each, and how many more there are.

    `replays` are scripts that run a failing call alone, by its name.
    """
    lines = [f"{headline(precheck):<8}  {verdict(precheck)}"]
    lines += _failing(precheck, limit)
    lines += ["", *counts(precheck, limit)]
    lines.append(
        f"device {plain(precheck.device)} against the CPU in higher precision, {plain(precheck.data)} data, "
        f"standard {plain(precheck.standard)}, {precheck.elapsed_s:.3g} s"
    )
    lines += [f"note      {plain(note)}" for note in precheck.notes[:limit]]
    if len(precheck.notes) > limit:
        lines.append(f"and {counted(len(precheck.notes) - limit, 'note')} more in summary.json")
    return "\n".join([*lines, *_next(precheck, replays or {})])


def headline(precheck: Precheck) -> str:
    """Return `PASSED`, `FAILED` or, if no call could be run, `CANNOT CHECK`."""
    return {0: "PASSED", 1: "FAILED"}.get(precheck.exit_code, "CANNOT CHECK")


def verdict(precheck: Precheck) -> str:
    """Return the sentence after the headline."""
    calls = counted(precheck.calls, "call")
    if precheck.exit_code == 1:
        ops = list(by_op(precheck))
        others = len({check.op for check in precheck.checks if check.because})
        inside = f", and {counted(others, 'op')} that {'calls' if others == 1 else 'call'} it" if others else ""
        fails = f"{precheck.failed:,} of {calls} {'fails' if precheck.failed == 1 else 'fail'}"
        fails += f", in {counted(len(ops), 'op')}{inside}"
        return f"{fails}{_unchecked(precheck)}"
    if precheck.exit_code == 0:
        if precheck.skipped:
            return (
                f"{precheck.passed:,} of {calls} {'passes' if precheck.passed == 1 else 'pass'}{_unchecked(precheck)}"
            )
        return (
            f"all {calls} pass{_unchecked(precheck)}" if precheck.calls != 1 else f"1 call passes{_unchecked(precheck)}"
        )
    return f"0 of {calls} could be run" if precheck.calls else "the run has no call that can be run alone"


def _unchecked(precheck: Precheck) -> str:
    """`, 2 not checked: custom op; 3 without their backward: dropout draws other numbers`, with the main reason of each."""
    text = ""
    if precheck.skipped:
        main = max(precheck.reasons, key=precheck.reasons.__getitem__, default="")
        text = f", {precheck.skipped:,} not checked" + (f": {plain(main)}" if main else "")
    partly: dict[str, int] = {}
    for check in precheck.checks:
        if check.forward != "skip" and check.backward == "skip":
            reason = next((one.message for one in check.details if one.direction == "backward"), "")
            if reason:
                partly[reason] = partly.get(reason, 0) + 1 + len(check.equal)
    if partly:
        text += f"; {sum(partly.values()):,} without their backward: {plain(max(partly, key=partly.__getitem__))}"
    return text


def by_op(precheck: Precheck) -> dict[str, list[CallCheck]]:
    """Return the failing calls of each op, in recorded order, without those that fail because of another op."""
    ops: dict[str, list[CallCheck]] = {}
    for check in precheck.checks:
        if "fail" in (check.forward, check.backward) and not check.because:
            ops.setdefault(check.op, []).append(check)
    return ops


def _failing(precheck: Precheck, limit: int) -> list[str]:
    """Describe the first call of each failing op: what failed, by how much, and the user's line."""
    lines = []
    ops = by_op(precheck)
    for op, checks in list(ops.items())[:limit]:
        first = checks[0]
        inside = inside_module(first.module)
        source = f"   {place_of(first.source)}" if first.source else ""
        total = sum(1 + len(check.equal) for check in checks)
        others = f"   ({total:,} calls of {plain(op)} fail)" if total > 1 else ""
        if total > len(checks):
            others = f"   ({counted(len(checks), 'distinct call')} of {plain(op)}, {total:,} times)"
        lines.append(f"  {plain(first.call)}{inside}{source}{others}")
        lines.append(f"{_MARGIN}{why(first)}")
        lines += callers(precheck, checks)
    if len(ops) > limit:
        lines.append(f"  and {counted(len(ops) - limit, 'op')} more")
    return lines


def callers(precheck: Precheck, checks: Sequence[CallCheck]) -> list[str]:
    """Return a line with the ops that fail because these calls fail inside them; nothing without any."""
    names = {check.call for check in checks}
    ops = list(dict.fromkeys(plain(check.op) for check in precheck.checks if check.because in names))
    return [f"{_MARGIN}fails inside {few(ops, _MOST_CALLERS)}: they call it"] if ops else []


def why(check: CallCheck) -> str:
    """Return the first failing output or gradient with its error and limit, or the message of the check."""
    wrong = _first_wrong(check)
    return plain(check.message) if wrong is None else why_failed(wrong)


def _first_wrong(check: CallCheck) -> Checked | None:
    return next((one for one in check.details if one.result == "fail"), None)


def why_failed(checked: Checked) -> str:
    """`backward output.0 (float32 [8, 16]): relative L2 3.1e-02 (allowed 4.8e-07)`."""
    if not checked.slot or checked.judged_by == "shape":
        return plain(checked.message)
    shape = "[" + ", ".join(map(str, checked.shape)) + "]"
    dtype = plain(checked.device_dtype.removeprefix("torch."))
    inputs = f" with inputs '{plain(checked.variant)}'" if checked.variant else ""
    inputs = f" with {NO_DROPOUT}" if checked.variant == NO_DROPOUT else inputs
    worst = f", worst at {checked.place}" if checked.place else ""
    error = f"{figure(checked.judged_by, checked.measured)} (allowed {checked.allowed:.2g}){worst}"
    return f"{checked.direction} {plain(checked.slot)} ({dtype} {shape}){inputs}: {error}"


def counts(precheck: Precheck, limit: int) -> list[str]:
    """Return a table of the calls that passed, failed and were skipped, and why."""
    judged = precheck.passed + precheck.failed
    rows = [("passed", precheck.passed), ("failed", precheck.failed), ("skipped", precheck.skipped)]
    width = max(len(f"{count:,}") for count in (*(count for _, count in rows), precheck.calls))
    distinct = "" if precheck.distinct == precheck.calls else f"   {precheck.distinct:,} of them distinct"
    lines = [f"{'calls':<8}  {precheck.calls:>{width},}{distinct}"]
    for word, count in rows:
        rate = f"   {_share(count, judged)} of the calls that ran" if word == "passed" and judged else ""
        lines.append(f"{word:<8}  {count:>{width},}{rate}")
    for reason, count in list(precheck.reasons.items())[:limit]:
        lines.append(f"{'':<8}  {count:>{width},}   {plain(reason)}")
    if len(precheck.reasons) > limit:
        rest = list(precheck.reasons.values())[limit:]
        lines.append(f"{'':<8}  {sum(rest):>{width},}   for {counted(len(rest), 'other reason')}")
    backward = precheck.backward_passed + precheck.backward_failed
    if backward:
        failed = f", {precheck.backward_failed:,} failed" if precheck.backward_failed else ""
        lines.append(f"{'backward':<8}  {backward:>{width},}   {precheck.backward_passed:,} passed{failed}")
    return lines


def _share(part: int, whole: int) -> str:
    """Return a share in percent; 100 only if it is all of them."""
    percent = 100 * part / whole
    return f"{min(percent, 99.99) if part < whole else percent:.4g} %"


def _next(precheck: Precheck, replays: Mapping[str, str]) -> list[str]:
    lines = []
    if precheck.output:
        table = precheck.output if precheck.output.endswith(".csv") else f"{precheck.output.rstrip('/')}/{RESULT_FILE}"
        lines.append(f"Full table: {plain(table)}")
    failing = [check for checks in by_op(precheck).values() for check in checks]
    run = shell(precheck.run)
    if failing:
        first = failing[0]
        saved = next((check.call for check in failing if check.call in replays), None)
        if saved is not None:
            lines.append(f"Run it alone: python {shell(replays[saved])}")
        else:
            lines.append(
                f"Save a script for it: tensorprobe precheck {run} {_options(precheck, first)} --save-failures -o FOLDER"
            )
    elif precheck.exit_code == 2:
        lines.append(f"Look at it:   tensorprobe inspect {run}")
    return lines


def _options(precheck: Precheck, check: CallCheck) -> str:
    """Return the options that check this call again in the same way, without defaults."""
    given = [("device", precheck.device, ""), ("data", precheck.data, "random")]
    given += [("standard", precheck.standard, "noise-aware"), ("steps", str(check.step), "0"), ("call", check.call, "")]
    wrong = _first_wrong(check)
    hard = ["--hard"] if wrong is not None and wrong.variant not in ("", NO_DROPOUT) else []
    return " ".join([*(f"--{name} {shell(value)}" for name, value, usual in given if value != usual), *hard])

"""What `tensorprobe audit` prints: the failing calls by op, where precision is lost, the counts; and the JUnit form."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, tostring

from tensorprobe.model.precheck import Audit, CallCheck, Loss
from tensorprobe.report.phrases import inside as inside_module
from tensorprobe.report.phrases import place_of
from tensorprobe.report.precheck_tables import RESULT_FILE
from tensorprobe.report.precheck_text import by_op, callers, counts, headline, why
from tensorprobe.text import counted, plain, shell, xml

_MARGIN = " " * 10
_SHOWN = 3


def render_audit(audit: Audit, *, replays: Mapping[str, str] | None = None, limit: int = 10) -> str:
    """The whole result as text; of each list at most `limit` lines, and how many more there are."""
    lines = [f"{headline(audit):<8}  {verdict(audit)}"]
    ops = list(by_op(audit).values())
    for checks in ops[:limit]:
        first = checks[0]
        inside = inside_module(first.module)
        source = f"   {place_of(first.source)}" if first.source else ""
        lines += [f"  {plain(first.call)}{inside}{source}", f"{_MARGIN}{why(first)}", *callers(audit, checks)]
    if len(ops) > limit:
        lines.append(f"  and {counted(len(ops) - limit, 'op')} more")
    for kind in ("module", "call"):
        losses = [loss for loss in audit.losses if loss.kind == kind][: min(limit, _SHOWN)]
        if losses:
            lines += ["", f"Largest error by {kind}, in units of the dtype's eps:"]
            lines += [f"  {_loss(loss)}" for loss in losses]
    lines += ["", *counts(audit, limit)]
    lines.append(
        "recorded results against float64 from the recorded inputs, "
        f"standard {plain(audit.standard)}, {audit.elapsed_s:.3g} s"
    )
    lines += [f"note      {plain(note)}" for note in audit.notes[:limit]]
    if len(audit.notes) > limit:
        lines.append(f"and {counted(len(audit.notes) - limit, 'note')} more in summary.json")
    return "\n".join([*lines, *_next(audit, replays or {})])


def verdict(audit: Audit) -> str:
    """`2 of 180 calls: Functional.softmax.0 and .1 are off by 5.0e-02 (allowed 2.4e-07)`; skips by their main reason."""
    calls, skipped = counted(audit.calls, "call"), ""
    if audit.skipped:
        reason, number = next(iter(audit.reasons.items()))
        others = audit.skipped - number
        why = f"{plain(reason)} ({number:,}), other reasons ({others:,})" if others else plain(reason)
        skipped = f"; {audit.skipped:,} not judged: {why}"
    if audit.exit_code == 2:
        return f"not one of {calls} could be judged{skipped}" if audit.calls else "the run holds no call to audit"
    if audit.exit_code == 0:
        return f"{audit.passed:,} of {calls}{skipped}"
    named = "; ".join(_group(checks) for checks in list(by_op(audit).values())[:_SHOWN])
    unnamed = len(by_op(audit)) - _SHOWN
    more = f"; and {counted(unnamed, 'op')} more" if unnamed > 0 else ""
    return f"{audit.failed:,} of {calls}: {named}{more}{skipped}"


def _group(checks: list[CallCheck]) -> str:
    """`Functional.softmax.0, .1 and 4 more are off by 5.0e-02 (allowed 2.4e-07)`."""
    names = list(dict.fromkeys(check.call.removesuffix(".forward") for check in checks))
    total = sum(1 + len(check.equal) for check in checks)
    shown = [plain(names[0]), *(f".{plain(name.rpartition('.')[2])}" for name in names[1:_SHOWN])]
    shown += [f"{total - len(shown):,} more"] if total > len(shown) else []
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    wrong = [one for check in checks for one in check.details if one.result == "fail"]
    worst = max(wrong, key=lambda one: one.relative_l2, default=None)
    verb = "is" if total == 1 else "are"
    if worst is None:
        return f"{listed} {verb} wrong"
    backward = " in backward" if worst.direction == "backward" else ""
    # What is printed as allowed belongs to the figure beside it.
    if worst.judged_by == "relative_l2":
        return f"{listed} {verb} off by {worst.measured:.1e}{backward} (allowed {worst.allowed:.1e})"
    decided = f"{plain(worst.judged_by.replace('_', ' '))} {worst.measured:.1e}, allowed {worst.allowed:.1e}"
    return f"{listed} {verb} off by {worst.relative_l2:.1e}{backward} ({decided})"


def _loss(loss: Loss) -> str:
    where = f"   in {plain(loss.module)}" if loss.kind == "call" and loss.module else ""
    calls = f"   {counted(loss.calls, 'call')}" if loss.kind == "module" else ""
    return f"{loss.error:>9.3g}   {plain(loss.name)}   {plain(loss.dtype)}{calls}{where}"


def _next(audit: Audit, replays: Mapping[str, str]) -> list[str]:
    lines = [f"Full table: {plain(audit.output.rstrip('/'))}/{RESULT_FILE}"] if audit.output else []
    failing = [check for checks in by_op(audit).values() for check in checks]
    run = shell(audit.run)
    if saved := next((check.call for check in failing if check.call in replays), None):
        lines.append(f"Run it alone: python {shell(replays[saved])}")
    elif failing:
        first = f"--steps {failing[0].step} --call {shell(failing[0].call)}"
        lines.append(f"Make a script of it: tensorprobe audit {run} {first} --save-failures -o DIR")
    elif audit.exit_code == 2:
        lines.append(f"Look at it:   tensorprobe inspect {run}")
    return lines


def render_audit_junit(audit: Audit, *, replays: Mapping[str, str] | None = None, limit: int = 10) -> str:
    """A test case for each distinct call, as JUnit XML."""
    suite = Element("testsuite", name="tensorprobe audit", time=f"{audit.elapsed_s:.3f}", tests=str(len(audit.checks)))
    for check in audit.checks:
        case = SubElement(suite, "testcase", classname=xml(check.module or check.op), name=xml(check.call))
        if "fail" in (check.forward, check.backward):
            SubElement(case, "failure", type="wrong", message=xml(why(check)))
        elif "pass" not in (check.forward, check.backward):
            SubElement(case, "skipped", message=xml(check.message))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    SubElement(suite, "system-out").text = xml(render_audit(audit, replays=replays, limit=limit))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(suite, encoding="unicode")}\n'

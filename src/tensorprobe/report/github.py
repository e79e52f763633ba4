"""A comparison as annotations of a GitHub workflow: lines of commands that the runner reads from stdout.

A message or a property is escaped so that a name in a run can neither end its line nor start a command of its own.
"""

from __future__ import annotations

from pathlib import Path

from tensorprobe.model.call import Frame
from tensorprobe.model.comparison import Comparison, Finding
from tensorprobe.report import phrases, wording
from tensorprobe.text import annotation, plain


def render_github(comparison: Comparison, *, limit: int = 10, root: str | None = None) -> str:
    """One error for the divergence, warnings for what differs in structure and before the first call; a notice when all agree.

    `root` is the folder of the checkout, by default the current one. GitHub shows an annotation in the diff when its file
    is given relative to that.
    """
    root = str(Path.cwd()) if root is None else root
    lines = [_answer(comparison, root)]
    for text in wording.before_first_call(comparison, limit=limit):
        lines.append(_command("warning", text, title="differs before the first call"))
    shown = [finding for finding in comparison.findings if not _is_answer(comparison, finding)]
    for finding in shown[:limit]:
        title = f"step {finding.step}, rank {finding.rank}: the calls differ"
        lines.append(_command("warning", wording.found(finding), title=title, source=finding.source, root=root))
    total = max(comparison.findings_total, len(comparison.findings))
    left = total - (len(comparison.findings) - len(shown)) - len(shown[:limit])
    if left:
        lines.append(_command("warning", f"{left:,} more calls or arguments differ", title="more"))
    return "\n".join(lines)


def _answer(comparison: Comparison, root: str) -> str:
    headline, divergence = wording.headline(comparison), comparison.divergence
    title = f"tensorprobe: {headline.lower()}"
    message = [f"{headline}  {wording.verdict(comparison)}"]
    if divergence is not None:
        message.append(wording.evidence(divergence))
    message += [line for line in (wording.cause(comparison), wording.counts(comparison)) if line]
    level = "notice" if headline == "AGREES" else "error"
    source = divergence.source if divergence is not None else None
    return _command(level, "\n".join(message), title=title, source=source, root=root)


def _is_answer(comparison: Comparison, finding: Finding) -> bool:
    return comparison.divergence is not None and comparison.divergence.finding == finding


def _command(level: str, message: str, *, title: str, source: Frame | None = None, root: str = "") -> str:
    properties = {"title": title}
    if source is not None:
        properties = {"file": plain(phrases.below(source.file, root)), "line": str(source.line), **properties}
    given = ",".join(f"{key}={annotation(value, is_property=True)}" for key, value in properties.items())
    return f"::{level} {given}::{annotation(message)}"

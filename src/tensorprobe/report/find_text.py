"""What `tensorprobe find` prints: whether each command repeats itself, then the answer, then what is inside the call."""

from __future__ import annotations

from tensorprobe.model.comparison import Comparison
from tensorprobe.model.search import Search, Window
from tensorprobe.report import wording
from tensorprobe.report.audit_text import verdict as audit_verdict
from tensorprobe.report.compare_text import render_comparison
from tensorprobe.report.precheck_text import headline as audit_headline
from tensorprobe.text import counted, plain, ranges, size

_TABLE = "result.parquet"


def render_search(search: Search, *, limit: int = 10) -> str:
    """Return the result as text."""
    first = [f"NOT REPEATABLE  {_itself(*each)}" for each in search.repeats.items() if each[1].exit_code]
    if search.exit_code == 2 and search.comparison.exit_code == 1:
        first.append("UNKNOWN   the difference below may be one between two executions of the same command")
    own = [f"repeats    {_itself(*each)}" for each in search.repeats.items() if not each[1].exit_code]
    if search.window is not None:
        own.append(f"values     {_said(search.window)}")
    if search.inside is not None:
        own.append(f"inside     {wording.headline(search.inside)}  {wording.verdict(search.inside)}")
        if search.inside.divergence is not None:
            own.append(f"           {wording.evidence(search.inside.divergence)}")
    for what, audit in search.audits.items():
        own.append(f"audit      {what}: {audit_headline(audit)}  {audit_verdict(audit)}")
    own += [f"note       {plain(note)}" for note in search.notes]
    answer, *rest = render_comparison(search.comparison, limit=limit, table=_TABLE).split("\n")
    at = next((number for number, line in enumerate(rest) if not line.startswith(" ")), len(rest))
    return "\n".join([*first, answer, *rest[:at], *own, *rest[at:]])


def _itself(which: str, twice: Comparison) -> str:
    """Return whether two executions of one command give the same."""
    if twice.exit_code:
        return f"two executions of the {which}'s command differ: {wording.verdict(twice)}"
    if twice.first_difference is not None:
        where = wording.where(twice.first_difference)
        return f"two executions of the {which}'s command differ within rounding, first at {where}"
    same = "statistics" if twice.bases.get("statistics") else "bits"  # on a device there are no digests
    return f"two executions of the {which}'s command give the same {same}"


def _said(window: Window) -> str:
    """Return what was recorded with values."""
    where = f"step {ranges(window.steps)}" + (f", rank {ranges(window.ranks)}" if window.ranks else "")
    every = counted(window.of_calls, "call")
    part = f"{window.calls:,} of {every}" if window.names else every
    return f"{where}: {part}, about {size(window.size_bytes)} in each run"

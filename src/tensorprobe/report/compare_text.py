"""What `tensorprobe compare` prints: the answer first, the evidence under it, the next command last."""

from __future__ import annotations

from collections.abc import Sequence

from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import Comparison, Divergence, RankAnswer
from tensorprobe.report import phrases, wording
from tensorprobe.text import counted, plain, ranges, shell

_MARGIN = " " * 10


def render_comparison(comparison: Comparison, *, limit: int = 10, table: str = "") -> str:
    """Return the result as text, with at most `limit` ranks, findings and parameters each, and how many more there are."""
    lines = _answer(comparison, limit)
    lines += wording.before_first_call(comparison, limit=min(limit, 3))
    lines += other_ranks(comparison, limit)
    lines += wording.regions(comparison)
    lines += _findings(comparison, limit)
    lines += first_difference(comparison)
    lines.append(wording.counts(comparison))
    facts = f"policy {plain(comparison.policy)}, {comparison.elapsed_s:.3g} s"
    lines.append(f"{wording.measured_by(comparison)}; {facts}")
    lines += [f"proof      {plain(line)}" for line in wording.proving(comparison)]
    lines.append(f"baseline   {wording.coverage(comparison.baseline)}")
    lines.append(f"candidate  {wording.coverage(comparison.candidate)}")
    lines += [f"note       {plain(note)}" for note in comparison.notes]
    return "\n".join([*lines, *_next(comparison, table)])


def look_at(comparison: Comparison, divergence: Divergence) -> str:
    """Return the command that shows the tensors of a divergence: of both runs, or of the one that made the call."""
    paths = (comparison.baseline.path, comparison.candidate.path)
    kind = "" if divergence.finding is None else divergence.finding.kind
    where = f"--step {divergence.step} --rank {divergence.rank}"
    if divergence.call and divergence.candidate_call and kind not in ("only_baseline", "only_candidate"):
        return f"tensorprobe diff {shell(paths[0])} {shell(paths[1])} {shell(divergence.call)} {where}"
    alone = kind == "only_candidate" or not divergence.call
    return f"tensorprobe inspect {shell(paths[alone])} {shell(divergence.candidate_call if alone else divergence.call)} {where}"


def _answer(comparison: Comparison, limit: int) -> list[str]:
    lines = [f"{wording.headline(comparison):<8}  {wording.verdict(comparison)}"]
    lines += [_MARGIN + line for line in wording.differing(comparison, limit=limit)]
    if comparison.divergence is not None:
        lines.append(_MARGIN + wording.evidence(comparison.divergence))
        if comparison.endings:
            lines.append(_MARGIN + wording.ended(comparison))
    if pattern := wording.pattern(comparison):
        lines.append(f"{_MARGIN}pattern: {pattern}")
    if cause := wording.cause(comparison):
        lines.append(_MARGIN + cause)
    amplified = comparison.statuses.get("amplified", 0)
    if amplified and comparison.divergence is None:
        calls = "1 call amplifies" if amplified == 1 else f"{amplified:,} calls amplify"
        lines.append(f"{_MARGIN}{calls} the noise of {'its' if amplified == 1 else 'their'} inputs")
    return lines


def other_ranks(comparison: Comparison, limit: int) -> list[str]:
    """Return the first divergence of each other rank. Ranks that diverge at the same call share a line."""
    if len(comparison.ranks) < 2:
        return []
    first = comparison.divergence
    others = [
        rank for rank in comparison.ranks if rank.answer == "diverged" and (first is None or rank.rank != first.rank)
    ]
    agreeing = [rank.rank for rank in comparison.ranks if rank.answer == "agrees"]
    lines = []
    if others:
        lines.append(f"{counted(len(others), 'other rank')} diverge{'s' if len(others) == 1 else ''}, first at")
        together = _together(others)
        lines += [f"  {line}" for line in together[:limit]]
        if len(together) > limit:
            lines.append(f"  and at {counted(len(together) - limit, 'other place')}")
    if agreeing and comparison.answer == "diverged":
        lines.append(
            f"{len(agreeing):,} of {counted(len(comparison.ranks), 'rank')} agree: {phrases.ranks_of(agreeing)}"
        )
    return lines


def _together(ranks: Sequence[RankAnswer]) -> list[str]:
    places: dict[str, list[int]] = {}
    for answer in ranks:
        divergence = answer.divergence
        text = "different calls" if divergence is None else f"step {divergence.step}: {_briefly(divergence)}"
        places.setdefault(text, []).append(answer.rank)
    return [f"{phrases.ranks_of(members)}: {text}" for text, members in places.items()]


def _briefly(divergence: Divergence) -> str:
    return f"{wording.what(divergence)}: {wording.status_of(divergence)}"


def _findings(comparison: Comparison, limit: int) -> list[str]:
    shown = comparison.findings[:limit]
    total = max(comparison.findings_total, len(comparison.findings))
    why = wording.why_unpaired(comparison)
    if not total:
        return [why] if why else []
    lines = [wording.found_in_all(comparison) + (f", the first {len(shown):,}:" if len(shown) < total else ":")]
    lines += [f"  {wording.found(finding)}" for finding in shown]
    return [*lines, why] if why else lines


def first_difference(comparison: Comparison) -> list[str]:
    if (first := wording.first_difference(comparison)) is not None:
        errors = f": {phrases.errors(first.row, first.place)}" if first.row is not None else ""
        return [f"First difference in any bit: {wording.where(first)}{errors}"]
    compared = comparison.bases.get("values", 0) + comparison.bases.get("digest", 0)
    if wording.headline(comparison) == "AGREES" and comparison.first_difference is None and compared == comparison.rows:
        return ["Calls with identical inputs have bit-identical outputs"]
    return []


def _next(comparison: Comparison, table: str) -> list[str]:
    lines = []
    if comparison.output:
        lines.append(
            f"Full table: {plain(comparison.output.rstrip('/') + f'/{table}' if table else comparison.output)}"
        )
        if table:
            lines.append(f"Page:       {plain(comparison.output.rstrip('/') + '/report.html')}")
    divergence = comparison.divergence
    if divergence is not None:
        lines.append(f"Look at it:   {look_at(comparison, divergence)}")
        if comparison.replay and comparison.output:
            lines.append(f"Run it alone: python {shell(comparison.output.rstrip('/') + '/' + comparison.replay)}")
        lines += _record_values(divergence)
    elif comparison.answer == "unfinished" and (steps := wording.whole_steps(comparison)):
        sides = f"{shell(comparison.baseline.path)} {shell(comparison.candidate.path)}"
        lines.append(f"Compare the whole part:   tensorprobe compare {sides} --steps {ranges(steps).replace(' ', '')}")
    elif wording.headline(comparison) == "CANNOT COMPARE":
        lines.append(f"Look at them: tensorprobe inspect {shell(comparison.baseline.path)}")
    return lines


def _record_values(divergence: Divergence) -> list[str]:
    """Return the command that records what a proof needs, if only statistics were recorded."""
    if divergence.status != "introduced" or divergence.row is None or divergence.row.basis != "statistics":
        return []
    level = "" if divergence.level == "api" else f" --level {divergence.level}"
    name = forward_name(divergence.call) or divergence.call
    chosen = f"--steps {divergence.step} --call {shell(name.removesuffix('.forward'))}"
    return [f"To prove it, record its values in both runs:   tensorprobe capture -o DIR{level} {chosen} -- COMMAND"]

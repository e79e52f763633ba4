"""A comparison as Markdown, for a comment on a pull request.

Whatever comes from a run stands in a code span: there it can neither format the page, link, nor call anybody by name.
"""

from __future__ import annotations

from pathlib import Path

from tensorprobe.model.comparison import Comparison, Divergence
from tensorprobe.report import phrases, wording
from tensorprobe.text import code, counted


def render_markdown(comparison: Comparison, *, limit: int = 10) -> str:
    """A heading with the answer, a table of the first divergence, counts, findings, and coverage folded away."""
    blocks = [_heading(comparison)]
    if comparison.divergence is not None:
        blocks.append(_divergence(comparison.divergence))
    sentences = [wording.cause(comparison), *wording.before_first_call(comparison, code, limit=limit)]
    if (first := wording.first_difference(comparison)) is not None:
        sentences.append(f"first difference in any bit: {wording.where(first, code)}")
    sentences += wording.differing(comparison, code)
    sentences += [f"note: {code(note)}" for note in comparison.notes]
    blocks.append("\n".join(f"- {sentence}" for sentence in sentences if sentence))
    blocks.append(
        f"{wording.counts(comparison, code)}  \n{wording.measured_by(comparison)}; policy {code(comparison.policy)}"
    )
    blocks += [_ranks(comparison, limit), _regions(comparison), _findings(comparison, limit), _coverage(comparison)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _heading(comparison: Comparison) -> str:
    if comparison.divergence is not None:
        return f"### tensorprobe: the runs diverge at {wording.name_of(comparison.divergence, code)}"
    return f"### tensorprobe: {wording.headline(comparison).lower()}: {wording.verdict(comparison, code)}"


def _divergence(divergence: Divergence) -> str:
    facts = {"first at": f"step {divergence.step}, rank {divergence.rank}", "call": wording.name_of(divergence, code)}
    if divergence.module:
        facts["module"] = code(divergence.module)
    if divergence.source is not None:
        line = divergence.source.code
        file = phrases.below(divergence.source.file, str(Path.cwd()))
        facts["source"] = code(f"{file}:{divergence.source.line}") + (f" {code(line)}" if line else "")
    facts["inputs"] = wording.inputs_of(divergence).removeprefix("inputs ")
    if divergence.row is not None:
        facts["tensor"] = phrases.tensor(divergence.row, code)
        facts["error"] = phrases.errors(divergence.row, divergence.place, code).replace("|Δ|", r"\|Δ\|")
    if divergence.finding is not None:
        facts["structure"] = wording.structure(divergence.finding, code)
        if divergence.finding.suggestion:
            facts["nearest"] = code(divergence.finding.suggestion)
    facts["verdict"] = wording.status_of(divergence)
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())])


def _ranks(comparison: Comparison, limit: int) -> str:
    if len(comparison.ranks) < 2:
        return ""
    diverged = [answer for answer in comparison.ranks if answer.answer == "diverged"]
    if not diverged:
        return ""
    lines = [
        f"{len(diverged):,} of {counted(len(comparison.ranks), 'rank')} diverge.",
        "",
        "| rank | first at |",
        "|---|---|",
    ]
    for answer in diverged[:limit]:
        place = wording.where(answer.divergence, code) if answer.divergence is not None else "different calls"
        lines.append(f"| {answer.rank} | {place} |")
    if len(diverged) > limit:
        lines.append(f"| … | and {len(diverged) - limit:,} more |")
    return "\n".join(lines)


def _regions(comparison: Comparison) -> str:
    first, *rest = wording.regions(comparison, code) or [""]
    return "\n".join([first, *(f"- {line.strip()}" for line in rest)])


def _findings(comparison: Comparison, limit: int) -> str:
    shown = comparison.findings[:limit]
    total = max(comparison.findings_total, len(comparison.findings))
    if not total:
        return ""
    lines = [
        wording.found_in_all(comparison),
        "",
        "| step | rank | call | what | source | nearest |",
        "|---|---|---|---|---|---|",
    ]
    for finding in shown:
        source = phrases.place_of(finding.source, code) if finding.source is not None else ""
        cells = [code(finding.call), wording.structure(finding, code), source, code(finding.suggestion)]
        lines.append(f"| {finding.step} | {finding.rank} | {' | '.join(cells)} |")
    if len(shown) < total:
        lines.append(f"| … | | and {total - len(shown):,} more | | | |")
    return "\n".join(lines)


def _coverage(comparison: Comparison) -> str:
    sides = [("baseline", comparison.baseline), ("candidate", comparison.candidate)]
    root = str(Path.cwd())
    lines = [
        f"- {name}: {wording.coverage(side, lambda text: code(phrases.below(str(text), root)))}" for name, side in sides
    ]
    return "\n".join(["<details><summary>coverage</summary>", "", *lines, "", "</details>"])

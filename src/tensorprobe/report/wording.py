"""The phrases of a comparison that several forms of report share.

In: structs of `model.comparison`. Out: phrases on one line. What comes from a run (names, paths, details) goes through
`show`, which makes it harmless for the form at hand: `plain` for a terminal, a code span for Markdown.
"""

from __future__ import annotations

import math

from tensorprobe.model.comparison import (
    ERROR,
    Comparison,
    Divergence,
    Ending,
    External,
    Finding,
    Proof,
    Region,
    RunSide,
)
from tensorprobe.report.pattern import pattern_words
from tensorprobe.report.phrases import Show, errors, inside, place_of, ranks_of, tally, tensor
from tensorprobe.text import counted, plain, ranges

_INPUTS = {
    "identical": "inputs agree exactly",
    "agree": "inputs agree within noise",
    "diverge": "inputs diverge",
    "unknown": "inputs not recorded",
}
_STATUSES = {
    "agrees": "within tolerance",
    "introduced": "introduced here",
    "entered": "the difference enters here",
    "inherited": "inherited from its inputs",
    "amplified": "the error of its inputs is amplified here",
    "structural": "the two calls differ",
    "unmeasured": "not measured",
}
_KINDS = {
    "only_baseline": "only in baseline",
    "only_candidate": "only in candidate",
    "shape": "different shape",
    "dtype": "different dtype",
    "arguments": "different arguments",
    "slots": "different tensors",
    "received": "a gradient that it received was recorded on one side only",
    "raised": "raised",
}
_BASES = {
    "values": "by values",
    "digest": "by equal digests",
    "statistics": "by statistics only (weaker)",
    "none": "not measured",
}
_ENTER = {
    "parameter": "parameters differ before step {}",
    "data": "data differ before step {}",
    "gradient": "gradients differ at step {}, though no recorded call made the difference",
    "input": "inputs differ at step {}, though no recorded call made the difference",
}
_NO_PARTNER = {"only_baseline": "the candidate makes no such call", "only_candidate": "the baseline makes no such call"}
_NOT_JUDGED = "not judged"


def headline(comparison: Comparison) -> str:
    """Return `DIVERGED`, `AGREES`, `UNFINISHED`, `CANNOT TELL` or, if nothing was compared, `CANNOT COMPARE`."""
    if comparison.answer in ("diverged", "unfinished"):
        return comparison.answer.upper()
    if comparison.answer == "unclear":
        return "CANNOT TELL"
    return "AGREES" if comparison.exit_code == 0 and comparison.buckets.paired else "CANNOT COMPARE"


def verdict(comparison: Comparison, show: Show = plain) -> str:
    """Return the sentence after the headline: where the runs diverge, or that they agree."""
    if (divergence := comparison.divergence) is not None:
        source = f"   {place_of(divergence.source, show)}" if divergence.source else ""
        return f"first at {where(divergence, show)}{source}"
    if comparison.answer == "diverged":
        return "before the first call" if comparison.externals else "the runs make different calls"
    if comparison.answer == "unfinished":
        return f"{ended(comparison, show)}; {agreeing_part(comparison)}"
    if comparison.answer == "unclear":
        first = comparison.untold[0]
        return f"whether {_external(first, show)} may differ before step {first.step}: {show(first.origin)}"
    if headline(comparison) == "AGREES":
        span = f"{counted(len(comparison.steps), 'step')}, {counted(len(comparison.ranks) or 1, 'rank')}"
        return f"no output diverges in {counted(comparison.buckets.paired, 'pair')} of calls, {span}"
    if not comparison.buckets.paired:
        return f"0 of {counted(total_calls(comparison), 'call')} have a partner"
    return f"nothing was measured in {counted(comparison.buckets.paired, 'pair')} of calls"


def ended(comparison: Comparison, show: Show = plain) -> str:
    """`the candidate ends in step 21`: where each run ends that did not finish, on the rank that got least far."""
    first: dict[str, Ending] = {}
    for ending in comparison.endings:
        held = first.get(ending.run)
        if held is None or ending.whole < held.whole:
            first[ending.run] = ending
    ranks = {answer.rank for answer in comparison.ranks}
    texts = []
    for ending in first.values():
        alike = {each.rank for each in comparison.endings if (each.run, each.whole) == (ending.run, ending.whole)}
        texts.append(_ended(ending, show) + ("" if alike >= ranks else f" (rank {ending.rank})"))
    return " and ".join(texts)


def _ended(ending: Ending, show: Show) -> str:
    if ending.step is None and ending.whole < 0:
        return f"the {ending.run} has no call"
    place = f"in step {ending.step}" if ending.step is not None else f"after step {ending.whole}"
    return f"the {ending.run} ends{f' with {show(ending.raised)}' if ending.raised else ''} {place}"


def differing(comparison: Comparison, show: Show = plain, *, limit: int = 10) -> list[str]:
    """`the programs differ in threads: 1 / 8 (baseline / candidate)`: a line for each, and how many more there are."""
    found = comparison.differing
    lines = [f"the programs differ in {show(each)}" for each in found[:limit]]
    if len(found) > limit:
        lines.append(f"and in {counted(len(found) - limit, 'other point')}")
    return lines


def agreeing_part(comparison: Comparison) -> str:
    """`steps 0-20 agree`: the steps that both runs have as a whole, or else the calls that both have."""
    steps = whole_steps(comparison)
    if steps:
        return f"step{'' if len(steps) == 1 else 's'} {ranges(steps)} agree{'s' if len(steps) == 1 else ''}"
    return f"{counted(comparison.buckets.paired, 'pair')} of calls, which both have, agree"


def whole_steps(comparison: Comparison) -> list[int]:
    """Return the compared steps that both runs have as a whole, on the ranks that both have."""
    ranks = {answer.rank for answer in comparison.ranks}
    last = min((ending.whole for ending in comparison.endings if ending.rank in ranks), default=None)
    return [step for step in comparison.steps if last is None or step <= last]


def where(divergence: Divergence, show: Show = plain) -> str:
    """`step 3, rank 0: Torch.matmul.12.forward in layers.7.mlp, output.0 (bfloat16 [8, 4096])`."""
    return f"step {divergence.step}, rank {divergence.rank}: {what(divergence, show)}"


def what(divergence: Divergence, show: Show = plain) -> str:
    """Return the call, its module, and its worst output or what differs about the call."""
    parts = [name_of(divergence, show)]
    if divergence.module:
        parts[0] += inside(divergence.module, show)
    finding = divergence.finding
    if divergence.region is not None:
        parts.append("the first of different calls with different results")
    elif finding is not None and (divergence.status == "structural" or divergence.row is None):
        parts.append(structure(finding, show))
    elif divergence.row is not None:
        parts.append(tensor(divergence.row, show))
    return ", ".join(parts)


def name_of(divergence: Divergence, show: Show = plain) -> str:
    """Return the name of the call, and its name in the candidate if that differs."""
    first, second = divergence.call, divergence.candidate_call
    if first and second and first != second:
        return f"{show(first)} ({show(second)} in the candidate)"
    return show(first or second)


def evidence(divergence: Divergence, show: Show = plain) -> str:
    """Say whether the inputs agree, how large the error is, what is allowed, and where the error comes from."""
    finding, status = divergence.finding, _STATUSES[divergence.status]
    if finding is not None and finding.kind in _NO_PARTNER:
        if divergence.row is not None and divergence.region is not None:
            shown = errors(divergence.row, divergence.place, show)
            sides = f"{_sides(divergence.region, show)} do not give the same"
            return f"{inputs_of(divergence)}; {shown}: {sides}{_proof_of_region(divergence, show)}"
        return _NO_PARTNER[finding.kind] + nearest(finding, show)
    if divergence.row is None or divergence.status == "structural":
        return f"{inputs_of(divergence)}: {status}"
    other = f"; {structure(finding, show)}" if finding is not None else ""
    shown = errors(divergence.row, divergence.place, show)
    if divergence.entered is not None:
        facts = [shown, show(divergence.entered.origin)]
        facts += ["the call itself is right on both sides (float64 replay)"] if _is_right(divergence) else []
        return f"{status} with {show(divergence.row.slot)}: {'; '.join(fact for fact in facts if fact)}{other}"
    return f"{inputs_of(divergence)}; {shown}: {status}{proof_of(divergence)}{other}"


def proof_of(divergence: Divergence) -> str:
    """`: the candidate is off by 7.8e-02, the baseline by 1.1e-07 (float64 replay)`, or nothing without a proof."""
    proof = divergence.proof
    if divergence.status != "introduced":
        return ""
    if divergence.random:
        return random_stream(proof)
    if proof is None:
        return f" (unproved: {plain(divergence.unproved)})" if divergence.unproved else ""
    sides = [("candidate", proof.candidate), ("baseline", proof.baseline)]
    if proof.baseline_wrong and not proof.candidate_wrong:
        sides.reverse()
    (first, error), (second, other) = sides
    which = "; the baseline is the wrong one" if first == "baseline" else ""
    which = "; both are within rounding" if _is_right(divergence) else which
    return f": the {first} is off by {error:.1e}, the {second} by {other:.1e} (float64 replay){which}"


def random_stream(proof: Proof | None) -> str:
    """Say that a call drew other random numbers, and whether those of both sides follow its law."""
    law = (
        ", by its law on both sides"
        if proof is not None and proof.slot
        else "; whether they follow its law is not known"
    )
    return f": it draws random numbers, from another random stream{law}. Seed both alike, set dropout to 0, or replay the mask"


def _proof_of_region(divergence: Divergence, show: Show) -> str:
    """`; each of these calls is right by itself (float64 replay): the formula differs, not a kernel`, or which are wrong."""
    proof = divergence.region_proof
    if divergence.random and not (proof and proof.wrong):
        return random_stream(None)
    if proof is None or not (proof.right or proof.wrong):
        return ""
    if proof.wrong:
        sides = (each.partition(" ") for each in proof.wrong[:3])
        listed = ", ".join(f"{show(name)} of the {side}" for side, _, name in sides)
        more = f" and {len(proof.wrong) - 3:,} more" if len(proof.wrong) > 3 else ""
        return f"; wrong by itself (float64 replay): {listed}{more}"
    if not proof.unproved:
        return "; each of these calls is right by itself (float64 replay): the formula differs, not a kernel"
    reason, _ = max(proof.unproved.items(), key=lambda item: item[1])
    are = "are" if proof.right > 1 else "is"
    return (
        f"; {counted(proof.right, 'call')} {are} right by {'themselves' if proof.right > 1 else 'itself'} (float64 replay), "
        f"{sum(proof.unproved.values()):,} not recomputed ({show(reason)})"
    )


def pattern(comparison: Comparison) -> str:
    """`only the last 4 columns (28-31 of axis 3), in all rows; on rank 1 only`, or nothing."""
    first = comparison.divergence
    if first is None:
        return ""
    alike = [
        rank.rank
        for rank in comparison.ranks
        if rank.divergence is not None and (rank.divergence.step, rank.divergence.call) == (first.step, first.call)
    ]
    few = first.status == "introduced" and 0 < len(alike) < len(comparison.ranks)
    on = f"on {ranks_of(alike)} only, of {len(comparison.ranks):,}" if few else ""
    return "; ".join(part for part in (pattern_words(first.pattern), on) if part)


def _is_right(divergence: Divergence) -> bool:
    proof = divergence.proof
    return proof is not None and not (proof.baseline_wrong or proof.candidate_wrong)


def proving(comparison: Comparison) -> list[str]:
    """What was proved, withdrawn, and not reached; nothing where nothing was replayed."""
    told = comparison.proving
    lines = []
    if told.replayed:
        lines.append(f"{counted(told.replayed, 'differing call')} recomputed in float64 on both sides")
    if told.withdrawn:
        are = "is" if told.withdrawn == 1 else "are"
        lines.append(
            f"{counted(told.withdrawn, 'call')} further apart than inference allows {are} within rounding of float64 on "
            "both sides: noise, not a fault"
        )
    if told.unreached:
        lines.append(
            f"{counted(told.unreached, 'differing call')} beyond the budget not recomputed: --prove all recomputes every one"
        )
    if told.unprovable:
        reason, count = max(told.unprovable.items(), key=lambda item: item[1])
        total = sum(told.unprovable.values())
        most = f", {count:,} of them" if count < total else ""
        lines.append(f"{counted(total, 'differing call')} could not be recomputed{most}: {reason}")
    return lines


def inputs_of(divergence: Divergence) -> str:
    """Say whether the inputs of the call agree, with their error if they do not."""
    words, error = _INPUTS[divergence.inputs], divergence.input_error
    if divergence.inputs in ("agree", "diverge") and math.isfinite(error) and error > 0:
        words += f" (relative L2 {error:{ERROR}})"
    return words


def status_of(divergence: Divergence) -> str:
    """`introduced here`, `inherited from its inputs`, …"""
    return _STATUSES[divergence.status]


def cause(comparison: Comparison) -> str:
    """Say where to look if no recorded call introduced the error; empty if one did."""
    divergence = comparison.divergence
    if divergence is None or divergence.status != "inherited" or comparison.statuses.get("introduced"):
        return ""
    if comparison.externals:
        return "no call introduces an error: it comes from the tensors that differ before the first call"
    return "no call introduces an error: the cause is before the captured part"


def structure(finding: Finding, show: Show = plain) -> str:
    """`only in baseline`, `other shape: …`, `raised RuntimeError in the candidate`."""
    words = _KINDS[finding.kind]
    if not finding.detail:
        return words
    if finding.kind == "raised":
        return f"{words} {show(finding.detail.removeprefix('raised '))}"
    return f"{words}: {show(finding.detail)}"


def found(finding: Finding, show: Show = plain) -> str:
    """Return one finding: where, what, the user's line, and a suggestion."""
    place = f"step {finding.step}, rank {finding.rank}: {show(finding.call)}{inside(finding.module, show)}"
    text = f"{place}, {structure(finding, show)}"
    text += f"   {place_of(finding.source, show)}" if finding.source else ""
    return text + nearest(finding, show)


def found_in_all(comparison: Comparison) -> str:
    """Return `1,002 calls or arguments differ (972 only in baseline, 30 only in candidate)`; nothing when none differ."""
    total = max(comparison.findings_total, len(comparison.findings))
    if not total:
        return ""
    lone = [
        (comparison.buckets.only_baseline, "only in baseline"),
        (comparison.buckets.only_candidate, "only in candidate"),
    ]
    parts = [f"{count:,} {words}" for count, words in lone if count]
    rest = total - sum(count for count, _ in lone)
    if rest > 0 and parts:
        parts.append(f"{rest:,} with different arguments, shapes or dtypes")
    differ = f"{total:,} {'call or argument differs' if total == 1 else 'calls or arguments differ'}"
    return f"{differ} ({', '.join(parts)})" if parts and rest >= 0 else differ


def why_unpaired(comparison: Comparison) -> str:
    """Return a known reason why one side makes other calls, and what to do; nothing when none is known."""
    alone = [(each.call, each.kind.removeprefix("only_")) for each in comparison.findings]
    alone += [
        (name, side)
        for region in (comparison.regions if comparison.answer == "unmeasured" else ())  # else their results tell
        for side, names in (("baseline", region.baseline), ("candidate", region.candidate))
        for name in names
    ]
    sides = {side for name, side in alone if "._foreach_" in name} & {"baseline", "candidate"}
    if len(sides) != 1:
        return ""
    (side,) = sides
    return (
        f"The optimizer of the {side} updates lists of tensors (foreach), the other one tensor after tensor: torch chooses by "
        "device. Pass foreach=False to both optimizers, or record the model alone (capture --module)."
    )


def regions(comparison: Comparison, show: Show = plain, *, limit: int = 3) -> list[str]:
    """`structure: 1,002 calls differ, all explained: …`, then where, and which calls stand for which."""
    found = [region for region in comparison.regions if region.agrees]
    if not found:
        return []
    wrong = [region for region in comparison.regions if region.begins]
    heirs = [region for region in comparison.regions if not (region.agrees or region.begins)]
    failing = sum(region.calls for region in wrong)
    calls = comparison.buckets.in_regions - failing - sum(region.calls for region in heirs)
    total = comparison.regions_total - len(wrong) - len(heirs)
    rest = comparison.buckets.only_baseline + comparison.buckets.only_candidate + failing
    lines = [
        f"structure: {counted(calls, 'call')} differ in {counted(total, 'region')} with the same result"
        + (f"; {counted(len(heirs), 'region')} inherit an error" if heirs else "")
        + (f"; {rest:,} calls not explained" if rest else "" if heirs else ", all explained")
    ]
    alike: dict[str, list[Region]] = {}
    for region in found:
        alike.setdefault(_sides(region, show), []).append(region)
    largest = sorted(alike.items(), key=lambda item: -sum(region.calls for region in item[1]))
    for text, same in largest[:limit]:
        times = f", {len(same):,} times" if len(same) > 1 else ""
        lines.append(f"  {text}{inside(same[0].module, show)}{times}")
    if more := total - sum(len(same) for _, same in largest[:limit]):
        lines.append(f"  and {counted(more, 'region')} more")
    return lines


def _sides(region: Region, show: Show) -> str:
    texts = []
    for side, names in (("baseline", region.baseline), ("candidate", region.candidate)):
        ops = list(dict.fromkeys(short_call(name) for name in names))
        listed = ", ".join(show(op) for op in ops[:4]) + (", …" if len(ops) > 4 else "")
        texts.append(f"{counted(len(names), 'call')} in {side} ({listed})" if names else f"no call in {side}")
    return " ↔ ".join(texts)


def short_call(name: str) -> str:
    """Return `softmax` of `Functional.softmax.0.forward`."""
    parts = name.split(".")
    return parts[-3] if len(parts) > 2 else name


def nearest(finding: Finding, show: Show = plain) -> str:
    """`; nearest: Torch.add.2.forward`, when there is such a call."""
    return f"; nearest: {show(finding.suggestion.removeprefix('nearest: '))}" if finding.suggestion else ""


def before_first_call(comparison: Comparison, show: Show = plain, *, limit: int = 10) -> list[str]:
    """`parameters differ before step 0: layers.3.weight, scaled by 1.01`: a line for each kind and step.

    An input that one call reads otherwise is said with that call already.
    """
    groups: dict[tuple[str, int], dict[str, list[int]]] = {}
    named = comparison.divergence.entered if comparison.divergence else None
    for external in [*comparison.externals, *comparison.untold]:
        if external.kind == "input" and external == named:
            continue
        ranks = groups.setdefault((external.kind, external.step), {}).setdefault(_external(external, show), [])
        if external.rank not in ranks:
            ranks.append(external.rank)
    many = len(comparison.ranks) > 1
    lines = []
    for (kind, step), tensors in groups.items():
        shown = [text + (f" ({ranks_of(ranks)})" if many else "") for text, ranks in list(tensors.items())[:limit]]
        if len(tensors) > limit:
            shown.append(f"and {len(tensors) - limit:,} more")
        lines.append(f"{_ENTER[kind].format(step)}: {'; '.join(shown)}")
    return lines


def first_difference(comparison: Comparison) -> Divergence | None:
    """Return the first difference in any bit, if it comes before the divergence or there is no divergence."""
    first, divergence = comparison.first_difference, comparison.divergence
    if first is None or divergence is None:
        return first
    if first.rank != divergence.rank:  # the order of calls is known within a rank only
        return first if first.step < divergence.step else None
    return first if (first.step, first.index) < (divergence.step, divergence.index) else None


def total_calls(comparison: Comparison) -> int:
    """Count the calls of both runs; a pair counts once."""
    buckets = comparison.buckets
    alone = buckets.in_regions + buckets.only_baseline + buckets.only_candidate
    return buckets.paired + alone + sum(buckets.skipped.values())


def counts(comparison: Comparison, show: Show = plain) -> str:
    """`1,204 calls: 1,187 agree · 9 diverge (1 introduced · 8 inherited) · …`; the parts add up to the whole."""
    buckets, statuses = comparison.buckets, comparison.statuses
    diverge = [(statuses.get(name, 0), name) for name in ("introduced", "entered", "inherited")]
    parts = [f"{statuses.get('agrees', 0):,} agree"]
    if total := sum(count for count, _ in diverge):
        each = [f"{count:,} {name}" for count, name in diverge if count or name != "entered"]
        parts.append(f"{total:,} diverge ({' · '.join(each)})")
    for count, words in (
        (statuses.get("amplified", 0), "amplified noise"),
        (statuses.get("structural", 0), "with different arguments or shapes"),
        (statuses.get("unmeasured", 0), "unmeasured"),
        (buckets.paired - sum(statuses.values()), _NOT_JUDGED),
        (buckets.in_regions, "in regions"),
        (buckets.only_baseline, "only in baseline"),
        (buckets.only_candidate, "only in candidate"),
    ):
        if count:
            parts.append(f"{count:,} {words}")
    if skipped := buckets.skipped:
        total = sum(skipped.values())
        why = show(next(iter(skipped))) if len(skipped) == 1 else tally(skipped, show)
        parts.append(f"{total:,} skipped ({why})")
    return f"{counted(total_calls(comparison), 'call')}: {' · '.join(parts)}"


def measured_by(comparison: Comparison) -> str:
    """`5,120 pairs of tensors: 4,000 by values · 1,120 by equal digests`."""
    parts = [f"{count:,} {_BASES.get(basis, plain(basis))}" for basis, count in comparison.bases.items() if count]
    return f"{counted(comparison.rows, 'pair')} of tensors" + (f": {' · '.join(parts)}" if parts else "")


def coverage(side: RunSide, show: Show = plain) -> str:
    """Return the coverage of one run: calls seen and recorded, blind spots, and whether it was closed."""
    devices = " ".join(side.devices[:4]) + (" …" if len(side.devices) > 4 else "")
    about = [side.mode, devices, f"torch {side.torch}" if side.torch else ""]
    text = f"{show(side.path)} ({', '.join(show(fact) for fact in about if fact)}): "
    if side.seen or (side.closed and not side.calls):
        text += f"{counted(side.seen, 'call')} seen, {side.recorded:,} recorded, {side.filtered:,} filtered, {side.failed:,} failed"
    else:
        text += f"{counted(side.calls, 'call')} read, coverage unknown"
    if side.blind_spots:
        text += f"; blind spots: {tally(side.blind_spots, show)}"
    return text if side.closed else f"{text}; not closed"


def _external(external: External, show: Show) -> str:
    name = show(external.name)
    if external.kind != "parameter" and external.call not in external.name:
        name += f" ({show(external.slot)} of {show(external.call)})"
    return f"{name}, {show(external.detail)}" if external.detail else name

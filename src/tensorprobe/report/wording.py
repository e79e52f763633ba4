"""The phrases of a comparison that several forms of report share.

In: structs of `model.comparison`. Out: phrases on one line. What comes from a run (names, paths, details) goes through
`show`, which makes it harmless for the form at hand: `plain` for a terminal, a code span for Markdown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from tensorprobe.model.call import Frame
from tensorprobe.model.comparison import (
    COUNT,
    ERROR,
    FIGURES,
    Column,
    Comparison,
    Divergence,
    External,
    Finding,
    Row,
    RunSide,
)
from tensorprobe.text import counted, plain

Show = Callable[[object], str]

_INPUTS = {
    "identical": "inputs agree exactly",
    "agree": "inputs agree within noise",
    "diverge": "inputs diverge",
    "unknown": "inputs not recorded",
}
_STATUSES = {
    "agrees": "within tolerance",
    "introduced": "introduced here",
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
    "raised": "raised",
}
_BASES = {
    "values": "by values",
    "digest": "by equal digests",
    "statistics": "by statistics only (weaker)",
    "none": "not measured",
}
_NO_FIGURE = Column("")
_NO_PARTNER = {"only_baseline": "the candidate makes no such call", "only_candidate": "the baseline makes no such call"}
_NOT_JUDGED = "not judged"


def headline(comparison: Comparison) -> str:
    """Return `DIVERGED`, `AGREES` or, if nothing was compared, `CANNOT COMPARE`."""
    if comparison.answer == "diverged":
        return "DIVERGED"
    return "AGREES" if comparison.exit_code == 0 and comparison.buckets.paired else "CANNOT COMPARE"


def verdict(comparison: Comparison, show: Show = plain) -> str:
    """Return the sentence after the headline: where the runs diverge, or that they agree."""
    if (divergence := comparison.divergence) is not None:
        source = f"   {place_of(divergence.source, show)}" if divergence.source else ""
        return f"first at {where(divergence, show)}{source}"
    if comparison.answer == "diverged":
        return "before the first call" if comparison.externals else "the runs make different calls"
    if headline(comparison) == "AGREES":
        span = f"{counted(len(comparison.steps), 'step')}, {counted(len(comparison.ranks) or 1, 'rank')}"
        return f"no output diverges in {counted(comparison.buckets.paired, 'pair')} of calls, {span}"
    if not comparison.buckets.paired:
        return f"0 of {counted(total_calls(comparison), 'call')} have a partner"
    return f"nothing was measured in {counted(comparison.buckets.paired, 'pair')} of calls"


def where(divergence: Divergence, show: Show = plain) -> str:
    """`step 3, rank 0: Torch.matmul.12.forward in layers.7.mlp, output.0 (bfloat16 [8, 4096])`."""
    return f"step {divergence.step}, rank {divergence.rank}: {what(divergence, show)}"


def what(divergence: Divergence, show: Show = plain) -> str:
    """Return the call, its module, and its worst output or what differs about the call."""
    parts = [name_of(divergence, show)]
    if divergence.module:
        parts[0] += inside(divergence.module, show)
    finding = divergence.finding
    if finding is not None and (divergence.status == "structural" or divergence.row is None):
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


def tensor(row: Row, show: Show = plain) -> str:
    """Return `output.0 (bfloat16 [8, 4096])`, and what the candidate has instead."""
    dtype, shape = row.candidate_dtype, row.candidate_shape
    changes = [
        show(there)
        for here, there in ((row.baseline_dtype, dtype), (row.baseline_shape, shape))
        if there and there != here
    ]
    other = f", {' '.join(changes)} in the candidate" if changes else ""
    return f"{show(row.slot)} ({show(row.baseline_dtype)} {show(row.baseline_shape)}{other})"


def evidence(divergence: Divergence, show: Show = plain) -> str:
    """Say whether the inputs agree, how large the error is, what is allowed, and where the error comes from."""
    finding, status = divergence.finding, _STATUSES[divergence.status]
    if finding is not None and finding.kind in _NO_PARTNER:
        return _NO_PARTNER[finding.kind] + nearest(finding, show)
    if divergence.row is None or divergence.status == "structural":
        return f"{inputs_of(divergence)}: {status}"
    other = f"; {structure(finding, show)}" if finding is not None else ""
    shown = errors(divergence.row, divergence.place, show)
    return f"{inputs_of(divergence)}; {shown}: {status}{proof_of(divergence)}{other}"


def proof_of(divergence: Divergence) -> str:
    """`: the candidate is off by 7.8e-02, the baseline by 1.1e-07 (float64 replay)`, or nothing without a proof."""
    proof = divergence.proof
    if proof is None or divergence.status != "introduced":
        return ""
    sides = [("candidate", proof.candidate), ("baseline", proof.baseline)]
    if proof.baseline_wrong and not proof.candidate_wrong:
        sides.reverse()
    (first, error), (second, other) = sides
    which = "; the baseline is the wrong one" if first == "baseline" else ""
    return f": the {first} is off by {error:.1e}, the {second} by {other:.1e} (float64 replay){which}"


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


def errors(row: Row, place: Iterable[int] = (), show: Show = plain) -> str:
    """Return the usual figures of a row, the one that decided, and its limit."""
    parts = []
    if row.nonfinite_different > 0:
        first = _position(row.nonfinite_index, row.baseline_shape)
        parts.append(
            f"NaN/inf in {counted(row.nonfinite_different, 'place')}" + (f", first at {first}" if first else "")
        )
    if not math.isnan(row.max_abs):
        index = list(place)  # if NaN or inf differ, this is their index
        at = _position(row.max_abs_index, row.baseline_shape) or (str(index) if index else "")
        parts.append(f"{figure('max_abs', row.max_abs)}{f' at {at}' if at else ''}{_limit(row, 'max_abs')}")
    if not math.isnan(row.relative_l2):
        parts.append(f"{figure('relative_l2', row.relative_l2)}{_limit(row, 'relative_l2')}")
    if row.basis == "statistics":
        parts += _statistics(row)
    elif row.judged_by == "bit_identical":
        parts.append("no difference in any bit is allowed")
    elif row.judged_by not in ("", "max_abs", "relative_l2", "nonfinite_different"):
        parts.append(f"{figure(row.judged_by, row.measured, show)}{_limit(row, row.judged_by)}")
    return ", ".join(parts) or show(row.note or "nothing was measured")


def _statistics(row: Row) -> list[str]:
    """Return what is known of a pair without values: norms, maxima, and the limit."""
    known = not math.isnan(row.baseline_norm) and not math.isnan(row.candidate_norm)
    norms = [f"norm {row.baseline_norm:.6g} in baseline, {row.candidate_norm:.6g} in candidate"] if known else []
    greatest = f"max {row.baseline_max:.6g} and {row.candidate_max:.6g}"
    said = {"max_abs": "difference of the greatest elements", "relative_l2": "relative difference of the norms"}
    words = said.get(row.judged_by)
    return [
        *norms,
        greatest,
        *([f"{words} {_number(row.measured, ERROR)} (allowed {_number(row.allowed, ERROR)})"] if words else []),
    ]


def figure(name: str, value: float, show: Show = plain) -> str:
    """Return `max |Δ| 3.1e-02`, or the name alone if there is no value."""
    column = FIGURES.get(name, _NO_FIGURE)
    words = column.words or show(name.replace("_", " "))
    return words if math.isnan(value) else f"{words} {_number(value, column.form)}"


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


def inside(module: str, show: Show = plain) -> str:
    """Return ` in module 'layers.7.mlp'`, or nothing for a call outside of all modules."""
    shown = show(module)
    return "" if not module else f" in module {shown if show is not plain else repr(shown)}"


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


def nearest(finding: Finding, show: Show = plain) -> str:
    """`; nearest: Torch.add.2.forward`, when there is such a call."""
    return f"; nearest: {show(finding.suggestion.removeprefix('nearest: '))}" if finding.suggestion else ""


def before_first_call(comparison: Comparison, show: Show = plain, *, limit: int = 10) -> list[str]:
    """`parameters differ before step 0: layers.3.weight, scaled by 1.01`: a line for each kind and step."""
    groups: dict[tuple[str, int], dict[str, list[int]]] = {}
    for external in comparison.externals:
        ranks = groups.setdefault((external.kind, external.step), {}).setdefault(_external(external, show), [])
        if external.rank not in ranks:
            ranks.append(external.rank)
    many = len(comparison.ranks) > 1
    lines = []
    for (kind, step), tensors in groups.items():
        shown = [text + (f" ({ranks_of(ranks)})" if many else "") for text, ranks in list(tensors.items())[:limit]]
        if len(tensors) > limit:
            shown.append(f"and {len(tensors) - limit:,} more")
        lines.append(f"{'parameters' if kind == 'parameter' else 'data'} differ before step {step}: {'; '.join(shown)}")
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
    return buckets.paired + buckets.only_baseline + buckets.only_candidate + sum(buckets.skipped.values())


def counts(comparison: Comparison, show: Show = plain) -> str:
    """`1,204 calls: 1,187 agree · 9 diverge (1 introduced · 8 inherited) · …`; the parts add up to the whole."""
    buckets, statuses = comparison.buckets, comparison.statuses
    introduced, inherited = statuses.get("introduced", 0), statuses.get("inherited", 0)
    parts = [f"{statuses.get('agrees', 0):,} agree"]
    if introduced or inherited:
        parts.append(f"{introduced + inherited:,} diverge ({introduced:,} introduced · {inherited:,} inherited)")
    for count, words in (
        (statuses.get("amplified", 0), "amplified noise"),
        (statuses.get("structural", 0), "with different arguments or shapes"),
        (statuses.get("unmeasured", 0), "unmeasured"),
        (buckets.paired - sum(statuses.values()), _NOT_JUDGED),
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
    return text if side.closed else f"{text}; not closed: its end may be missing"


def tally(numbers: Mapping[str, int], show: Show = plain) -> str:
    """`jit.script 2, compiled 1`."""
    return ", ".join(f"{show(reason)} {count:,}" for reason, count in numbers.items())


def ranks_of(ranks: Iterable[int], *, limit: int = 8) -> str:
    """`rank 3`, `ranks 0, 1, 2`."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - limit:,} more" if len(numbers) > limit else ""
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers[:limit]))}{more}"


def place_of(frame: Frame, show: Show = plain) -> str:
    """`model.py:88`."""
    return show(f"{frame.file}:{frame.line}")


def _external(external: External, show: Show) -> str:
    name = show(external.name)
    if external.kind == "data" and external.call not in external.name:
        name += f" ({show(external.slot)} of {show(external.call)})"
    return f"{name}, {show(external.detail)}" if external.detail else name


def _limit(row: Row, name: str) -> str:
    if row.judged_by != name or math.isnan(row.allowed):
        return ""
    return f" (allowed {_number(row.allowed, FIGURES.get(name, _NO_FIGURE).form)})"


def _number(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if form == COUNT and value == int(value):
        return f"{int(value):,}"
    return f"{value:{form}}"


def _position(flat: int, shape: str) -> str:
    """Return a flat index as an index in the shape, as it is if the shape cannot be read, or nothing."""
    if flat < 0:
        return ""
    try:
        sizes = json.loads(shape)
    except (ValueError, RecursionError):
        return f"element {flat:,}"
    if not isinstance(sizes, list) or not all(isinstance(length, int) and length > 0 for length in sizes):
        return f"element {flat:,}"
    index: list[int] = []
    for length in reversed(sizes):
        flat, inside = divmod(flat, length)
        index.insert(0, inside)
    return str(index)

"""What `tensorprobe diff` prints: both tensors, the pattern of the error, its profile, its worst elements, a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from tensorprobe.errors import SettingsError
from tensorprobe.model.comparison import FIGURES
from tensorprobe.model.diff import CallDiff, Histogram, Profile, SlotLine, TensorDiff, Worst
from tensorprobe.report.pattern import pattern_words
from tensorprobe.text import counted, plain, shell

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR = 32
_SHOWN = ("max_abs", "relative_l2", "one_minus_cosine", "ulp_max", "bias", "slope", "nonfinite_different")
_DECADES = 6
"""A bar chart on a logarithmic scale shows so many powers of ten."""


def render_diffs(diffs: Sequence[CallDiff], *, runs: tuple[str, str], by: str | None = None, limit: int = 20) -> str:
    """Return one call in full, or several in a line each."""
    if len(diffs) == 1:
        return render_diff(diffs[0], by=by, limit=limit)
    width = max(len(plain(each.call)) for each in diffs)
    lines = [f"{counted(len(diffs), 'call')}" + (f", the first {limit:,}:" if len(diffs) > limit else ":")]
    lines += [f"  {plain(each.call):<{width}}  {_briefly(each)}" for each in diffs[:limit]]
    worst = max(diffs, key=_worst_error)
    lines.append(f"\nLook at the worst:   tensorprobe diff {shell(runs[0])} {shell(runs[1])} {shell(worst.call)}")
    return "\n".join(lines)


def render_diff(diff: CallDiff, *, by: str | None = None, limit: int = 20) -> str:
    """Return one call: a line for each slot, then the chosen tensor."""
    partner = f" ({plain(diff.candidate_call)} in the candidate)" if diff.candidate_call != diff.call else ""
    module = f"   in module {plain(diff.module)!r}" if diff.module else ""
    lines = [f"{plain(diff.call)}{partner}   step {diff.step}, rank {diff.rank}{module}"]
    width = max((len(plain(line.slot)) for line in diff.slots), default=0)
    lines += [f"  {plain(line.slot):<{width}}  {_slot(line)}" for line in diff.slots]
    if not diff.slots:
        lines.append("  No tensors in both runs.")
    if diff.tensor is not None:
        lines += ["", *_tensor(diff.tensor, by, limit)]
    return "\n".join(lines)


def _briefly(diff: CallDiff) -> str:
    tensor = diff.tensor
    line = next((line for line in diff.slots if tensor is not None and line.slot == tensor.slot), None)
    if line is None or line.equal:
        return "equal" if diff.slots else "no tensors"
    words = pattern_words(tensor.pattern) if tensor is not None else ""
    return f"{plain(line.slot)}: {_slot(line)}" + (f"; {words}" if words else "")


def _worst_error(diff: CallDiff) -> float:
    errors = [line.relative_l2 for line in diff.slots if line.slot.startswith("output")]
    return max((error for error in errors if not math.isnan(error)), default=-1.0)


def _slot(line: SlotLine) -> str:
    (first, second), (shape, other) = line.dtypes, line.shapes
    kind = plain(first) if first == second else f"{plain(first)}/{plain(second)}"
    what = f"{kind} {plain(shape)}" if shape == other else f"{kind} {plain(shape)}/{plain(other)}"
    if line.problem:
        return f"{what}   {plain(line.problem)}"
    if line.equal:
        return f"{what}   equal"
    return f"{what}   max |Δ| {line.max_abs:.1e}, relative L2 {line.relative_l2:.1e}"


def _tensor(diff: TensorDiff, by: str | None, limit: int) -> list[str]:
    lines = [plain(diff.slot)]
    for side, summary in zip(("baseline", "candidate"), diff.summaries, strict=True):
        if summary is not None:
            nonfinite = "".join(
                f"   {name} {count:,}" for name, count in (("nan", summary.nan), ("inf", summary.inf)) if count > 0
            )
            facts = "   ".join(f"{name} {getattr(summary, name):.6g}" for name in ("max", "min", "mean", "norm"))
            lines.append(f"  {side:<10} {facts}{nonfinite}")
    figures = [
        f"{FIGURES[name].words or 'NaN/inf that differ'} {_off(diff.figures[name], name):{FIGURES[name].form}}"
        for name in _SHOWN
        if name in diff.figures and diff.figures[name] != FIGURES[name].equal
    ]
    if figures:
        lines.append(f"  {'difference':<10} {', '.join(figures)}")
    if diff.problem:
        lines.append(f"  {plain(diff.problem)}")
    if not diff.figures or not diff.worst:
        return lines
    lines.append(
        f"  {'pattern':<10} {pattern_words(diff.pattern) or 'none: the elements that differ have nothing in common'}"
    )
    profile = choose_profile(diff, by)
    if profile is not None:
        lines += ["", f"  max |Δ| along axis {profile.axis} ({profile.name}, {profile.size:,}):", *_profile(profile)]
    lines += ["", *_worst(diff.worst[:limit], diff.figures.get("different", 0))]
    for name, histogram in (("Δ", diff.differences), ("ULP", diff.ulps)):
        if histogram is not None:
            lines += ["", *_histogram(name, histogram)]
    return lines


def _off(value: float, name: str) -> float:
    """Return a figure as its words say it: a slope as its distance from 1."""
    return value - 1 if name == "slope" else value


def choose_profile(diff: TensorDiff, by: str | None) -> Profile | None:
    """Return the profile along an axis, by number or name; by default along the one that the pattern is limited to.

    SettingsError for an axis that the tensor does not have.
    """
    if by is None:
        limited = [part.axis for part in (diff.pattern.axes if diff.pattern else []) if part.extent != "all"]
        axis = limited[-1] if limited else diff.profiles[-1].axis if diff.profiles else -1
        return next((profile for profile in diff.profiles if profile.axis == axis), None)
    dimensions = len(diff.shapes[0])
    for profile in diff.profiles:
        if by in (str(profile.axis), str(profile.axis - dimensions), profile.name):
            return profile
    known = ", ".join(f"{profile.axis} ({profile.name})" for profile in diff.profiles) or "none of more than one index"
    raise SettingsError(f"--by {plain(by)}: {plain(diff.slot)} has no such axis. It has {known}.")


def _profile(profile: Profile) -> list[str]:
    """Return a bar for each bin. Neighbours without a difference share a line."""
    top = max((value for value in profile.greatest if math.isfinite(value)), default=0.0)
    lines = []
    bins = list(enumerate(zip(profile.greatest, profile.different, strict=True)))
    for empty, members in groupby(bins, key=lambda each: not each[1][1]):
        held = list(members)
        for run in [held] if empty else [[each] for each in held]:
            first, last = run[0][0] * profile.width, min((run[-1][0] + 1) * profile.width, profile.size) - 1
            where = f"{first}" if first == last else f"{first}-{last}"
            value, count = run[0][1]
            facts = f"{value:.1e}   {counted(count, 'element')}" if count else "equal"
            lines.append(f"  {where:>11}  {_bar(value, top):<{_BAR}}  {facts}")
    return lines


def _bar(value: float, top: float) -> str:
    """Return a bar on a logarithmic scale of six powers of ten below the greatest value."""
    if not value or not top:
        return ""
    share = 1.0 if not math.isfinite(value) else 1 + math.log10(value / top) / _DECADES
    eighths = max(1, round(share * _BAR * 8)) if share > 0 else 1
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _worst(worst: Sequence[Worst], different: float) -> list[str]:
    places = [str(each.index) for each in worst]
    width = max(map(len, places))
    lines = [f"  worst {len(worst):,} of {counted(int(different), 'element')} that differ"]
    lines.append(f"  {'index':<{width}}  {'baseline':>13}  {'candidate':>13}  {'difference':>10}  {'ULP':>9}")
    for place, each in zip(places, worst, strict=True):
        values = f"{float(each.baseline):>13.6g}  {float(each.candidate):>13.6g}"
        lines.append(f"  {place:<{width}}  {values}  {each.difference:>10.1e}  {each.ulp:>9,.3g}")
    return lines


def _histogram(name: str, histogram: Histogram) -> list[str]:
    """Return one row of blocks, with the edges under it."""
    (counts,) = histogram.counts.values()
    top = max(counts, default=0)
    scaled = [0 if not count else max(1, round(8 * math.log(1 + count) / math.log(1 + top))) for count in counts]
    bars = "".join(_BLOCKS[level] for level in scaled)
    low, high = histogram.edges[0], max(edge for edge in histogram.edges if math.isfinite(edge))
    sample = f", {histogram.sampled:,} elements sampled" if histogram.sampled else ""
    return [f"  histogram of {name} (logarithmic{sample})", f"  {low:.1e} │{bars}│ {high:.1e}"]

"""The text that `tensorprobe inspect` prints, made from the structs of `model.overview`.

Control characters in names and values are escaped, so that a hostile file cannot control the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from tensorprobe.model import ArgumentTree, Coverage
from tensorprobe.model.overview import CallLine, CallView, Element, Number, RunOverview, SlotView
from tensorprobe.text import counted, plain, ranges, shell, size

_VALUES_WIDTH = 96
_PATH_WIDTH = 40


def render_run(overview: RunOverview, *, limit: int = 20) -> str:
    """Describe a run, with at most `limit` lines for its steps and ranks."""
    lines = []
    if overview.incomplete:
        lines.append(f"RunIncomplete: {plain(overview.incomplete)}")
    lines.append(
        f"{plain(overview.path)}: {counted(len(overview.steps), 'step')}, {counted(len(overview.ranks), 'rank')}, "
        f"{counted(overview.calls, 'call')}, {size(overview.size_bytes)} of tensors"
        + (", closed" if overview.closed else "")
    )
    if overview.damaged:
        lines.append(f"DAMAGED: {counted(overview.damaged, 'line')} cannot be read. List them with --verify")
    lines += [*_about(overview), *_provenance(overview)]
    lines += render_coverage(overview.coverage, closed=overview.closed, calls=overview.calls)
    lines += ["", *_segments(overview, limit)]
    run = shell(overview.path)
    lines += [
        "",
        f"List the calls of a step:   tensorprobe inspect {run} --step {overview.steps[0] if overview.steps else 0}",
    ]
    if overview.example:
        lines.append(f"Look at one call:           tensorprobe inspect {run} {shell(overview.example)}")
    return "\n".join(lines)


def render_lines(calls: Sequence[CallLine], total: int, *, run: str) -> str:
    """List calls, and say how many are left out."""
    if not calls:
        return "No calls."
    width = max(len(plain(call.name)) for call in calls)
    lines = [f"{counted(total, 'call')}" + (f", the first {len(calls):,}:" if len(calls) < total else ":")]
    place = None
    for call in calls:
        if place != (call.step, call.rank, call.phase):
            place = (call.step, call.rank, call.phase)
            lines.append(f"step {call.step}, rank {call.rank}" + (f": {plain(call.phase)}" if call.phase else ""))
        repeat = f"  (repeat {call.repeat})" if call.repeat else ""
        outputs = ", ".join(plain(output) for output in call.outputs[:3]) + (", …" if len(call.outputs) > 3 else "")
        module = f"  in {plain(call.module)}" if call.module else ""
        lines.append(f"  {call.index:>6}  {plain(call.name):<{width}}  {outputs}{module}{repeat}".rstrip())
    if len(calls) < total:
        lines.append(f"{total - len(calls):,} more: --limit {total}")
    lines.append(f"\nLook at one:   tensorprobe inspect {shell(run)} {shell(calls[0].name)}")
    return "\n".join(lines)


def render_calls(calls: Sequence[CallView], total: int, *, run: str) -> str:
    """Show calls in full, how many are left out, and how to export their values."""
    parts = [render_call(call) for call in calls]
    if len(calls) < total:
        parts.append(f"{total - len(calls):,} more: --limit {total}")
    if calls and any(slot.first for call in calls for slot in call.slots):
        name = shell(calls[0].name)
        parts.append(f"Export all values:   tensorprobe export {shell(run)} -o FOLDER --to npy --call {name}")
    return "\n\n".join(parts)


def render_call(call: CallView) -> str:
    """Show one call: its position, stack, arguments and tensors."""
    lines = [f"{plain(call.name)}   step {call.step}, rank {call.rank}, call {call.index}"]
    facts = [("level", call.level), ("module", call.module), ("parent", call.parent), ("backward of", call.origin)]
    batch = "" if call.microbatch is None else f", micro-batch {call.microbatch}"
    facts.append(("phase", f"{call.phase}{batch}" if call.phase else None))
    if call.repeat:
        facts.append(("repeat", f"{call.repeat} (recomputed, or a second backward)"))
    if call.thread:
        facts.append(("thread", str(call.thread)))
    facts.append(("raised", call.raised))
    lines += [f"  {key:<11} {plain(value)}" for key, value in facts if value]
    if call.args is not None or call.kwargs is not None:
        lines.append(f"  {'arguments':<11} {render_arguments(call.args, call.kwargs)}")
    for position, frame in enumerate(call.frames):
        lines.append(f"  {'stack' if not position else '':<11} {plain(str(frame))}")
    for slot in call.slots:
        lines += ["", *_slot(slot)]
    if not call.slots:
        lines.append("  No tensors.")
    return "\n".join(lines)


def render_verification(
    problems: Sequence[str], *, calls: int, slots: int, bytes_hashed: int, cut: bool, limit: int = 20
) -> str:
    """Show the result of `--verify`."""
    checked = f"{counted(calls, 'call')}, {counted(slots, 'slot')}, {size(bytes_hashed)} read"
    if not problems:
        what = (
            "the format is valid and every digest matches"
            if bytes_hashed
            else "the format is valid; no digests to check"
        )
        return f"INTACT  {checked}: {what}."
    lines = [f"DAMAGED  {'at least ' if cut else ''}{counted(len(problems), 'problem')} in {checked}:"]
    lines += [f"  {plain(problem)}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  and {len(problems) - limit:,} more: --limit {len(problems)}")
    return "\n".join(lines)


def render_arguments(args: ArgumentTree, kwargs: ArgumentTree) -> str:
    """Return the arguments as in a call. A tensor is the name of its slot in angle brackets."""
    parts = [_tree(arg) for arg in args] if isinstance(args, list) else [_tree(args)] if args is not None else []
    if isinstance(kwargs, dict):
        parts += [f"{key}={_tree(value)}" for key, value in kwargs.items()]
    return plain(f"({', '.join(parts)})")


def _about(overview: RunOverview) -> list[str]:
    tool = plain(overview.tool)
    versions = [("torch", overview.torch), ("python", overview.python)]
    facts = [f"{name} {plain(version)}" for name, version in versions if version]
    facts = [tool if tool[:1].isalpha() else f"tensorprobe {tool}", *facts, f"world size {overview.world_size}"]
    created = f"{plain(overview.created)} " if overview.created else ""
    lines = [f"  recorded    {created}by {', '.join(facts)}"]
    by_device: dict[str, list[int]] = {}
    for rank, device in overview.devices.items():
        by_device.setdefault(device or "unknown", []).append(rank)
    devices = " · ".join(f"{plain(device)} (rank {_few(ranks)})" for device, ranks in by_device.items())
    lines.append(f"  devices     {devices or 'unknown'}")
    for rank, coordinates in list(overview.coordinates.items())[:16]:
        if coordinates:
            placed = ", ".join(f"{plain(axis)} {at}" for axis, at in coordinates.items())
            lines.append(f"  rank {rank:<6} {placed}")
    settings = " ".join(
        f"{plain(key)}={plain(value)}" for key, value in overview.settings.items() if value not in (None, [])
    )
    lines.append(f"  settings    {settings or 'none recorded'}")
    return lines


def _provenance(overview: RunOverview) -> list[str]:
    """Return the command and what may change its numbers. Nothing here is trusted to have the types that we write."""
    about = overview.provenance
    argv = about.get("argv")
    ended = "" if overview.exit_code is None else f"   (exit code {overview.exit_code})"
    commit = about.get("commit")
    facts = [
        ("command", f"{' '.join(map(shell, argv))}{ended}" if isinstance(argv, list) else ended.strip()),
        ("folder", about.get("cwd")),
        ("commit", f"{commit}{', with changes' if about.get('dirty') else ''}" if commit else None),
        ("seed", about.get("seed")),
        *((name, _pairs(about.get(name))) for name in ("packages", "switches", "environment")),
        ("lacks", overview.lacks),
    ]
    return [f"  {name:<11} {plain(fact)}" for name, fact in facts if fact not in (None, "")]


def _pairs(table: object) -> str:
    return " · ".join(f"{name} {value}" for name, value in table.items()) if isinstance(table, dict) else ""


def render_coverage(coverage: Coverage, *, closed: bool, calls: int = 0) -> list[str]:
    """Return lines that count the calls seen, recorded and not recorded."""
    if not closed and not coverage.seen:
        return ["  coverage    unknown: it is written when the run is closed"]
    if calls and not coverage.seen:
        return ["  coverage    unknown", *(f"  note        {plain(note)}" for note in coverage.notes)]
    lines = [
        f"  coverage    {counted(coverage.seen, 'call')} seen: {coverage.recorded:,} recorded · "
        f"{coverage.filtered:,} filtered · {coverage.failed:,} failed; {counted(coverage.slots, 'slot')}, "
        f"{size(coverage.bytes_seen)} seen, {size(coverage.bytes_written)} written"
    ]
    if coverage.slots_skipped:
        lines.append(f"  skipped     {_counts(coverage.slots_skipped)}")
    if coverage.blind_spots:
        lines.append(f"  blind spots {_counts(coverage.blind_spots)}")
    for name, close in coverage.unmatched.items():
        hint = f"; nearest: {', '.join(plain(other) for other in close)}" if close else ""
        lines.append(f"  no match    {plain(name)!r} matches no call{hint}")
    lines += [f"  note        {plain(note)}" for note in coverage.notes]
    lines += [f"  limit       {plain(limit)}" for limit in coverage.limits]
    if coverage.first_error:
        lines.append(f"  first error {plain(coverage.first_error)}")
    return lines


def _segments(overview: RunOverview, limit: int) -> list[str]:
    lines = ["  step  rank      calls   tensors"]
    for segment in overview.segments[:limit]:
        damaged = f"   {counted(segment.damaged, 'damaged line')}" if segment.damaged else ""
        lines.append(
            f"  {segment.step:>4}  {segment.rank:>4}  {segment.calls:>9,}   {size(segment.size_bytes)}{damaged}"
        )
    if len(overview.segments) > limit:
        lines.append(f"  and {len(overview.segments) - limit:,} more: --limit {len(overview.segments)}")
    return lines


def _slot(slot: SlotView) -> list[str]:
    notes = [plain(slot.device), size(slot.nbytes) if slot.nbytes else ""]
    notes += ["requires grad" if slot.grad else "", f"stride {list(slot.stride)}" if slot.stride is not None else ""]
    shape = plain(list(slot.shape))
    lines = [f"  {plain(slot.name):<14} {plain(slot.dtype)} {shape}   {' · '.join(note for note in notes if note)}"]
    margin = " " * 17
    if slot.skipped:
        lines.append(f"{margin}{'not recorded' if slot.summary is None else 'not compared'}: {plain(slot.skipped)}")
    if (summary := slot.summary) is not None:
        facts = [
            f"{name} {_value(getattr(summary, name))}{_at(slot.places.get(name))}"
            for name in ("max", "min", "mean", "norm")
            if name != "norm" or summary.norm == summary.norm or summary.mean != summary.mean
        ]
        for name in ("nan", "inf"):
            if getattr(summary, name) < 0:
                facts.append(f"{name} not counted")
            elif getattr(summary, name):
                facts.append(f"{name} {getattr(summary, name):,}{_at(slot.places.get(name), 'first at')}")
        lines.append(margin + "   ".join(facts))
    if slot.first:
        more = " …" if math.prod(slot.shape) > len(slot.first) else ""
        shown = wrap(" ".join(_value(value) for value in slot.first) + more, _VALUES_WIDTH)
        lines += [f"{margin}{'values' if not at else '      '} {line}" for at, line in enumerate(shown)]
    if slot.problem:
        lines.append(f"{margin}{plain(slot.problem)}")
    return lines


def _at(place: Element | None, word: str = "at") -> str:
    return f" {word} {place.index}" if place is not None else ""


def _value(value: Number) -> str:
    return f"{value:.6g}" if isinstance(value, float) else plain(value)


def _counts(counts: Mapping[str, int]) -> str:
    return " · ".join(f"{plain(reason)} {count:,}" for reason, count in counts.items())


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _tree(tree: ArgumentTree) -> str:
    if isinstance(tree, list):
        return f"[{', '.join(map(_tree, tree))}]"
    if not isinstance(tree, dict):
        return repr(tree)
    if set(tree) == {"slot"}:
        return f"<{tree['slot']}>"
    if set(tree) != {"type", "value"}:
        return f"{{{', '.join(f'{key}: {_tree(value)}' for key, value in tree.items())}}}"
    kind, value = tree["type"], tree["value"]
    if kind == "tuple" and isinstance(value, list):
        return f"({', '.join(map(_tree, value))}{',' if len(value) == 1 else ''})"
    if kind == "dict":
        return _tree(value)
    if isinstance(value, str):
        return value
    return f"{kind}({_tree(value)})"


def render_two_runs(
    runs: tuple[RunOverview, RunOverview],
    ops: tuple[Mapping[str, int], Mapping[str, int]],
    *,
    paths: tuple[str, str],
    limit: int = 20,
) -> str:
    """Return the facts of both runs, then the ops that they call a different number of times."""
    width = max(_PATH_WIDTH, len(plain(paths[0])))
    facts = list(_facts_of_both(runs))
    margin = max(len(name) for name, *_ in facts)
    lines = [f"  {'':<{margin}} {plain(paths[0]):<{width}}  {plain(paths[1])}"]
    for name, first, second in facts:
        mark = " " if first == second else "≠"
        lines.append(f"{mark} {name:<{margin}} {plain(first):<{width}}  {plain(second)}".rstrip())
    differing = [op for op in {**ops[0], **ops[1]} if ops[0].get(op, 0) != ops[1].get(op, 0)]
    lines += [
        "",
        f"{counted(len({**ops[0], **ops[1]}) - len(differing), 'op')} called equally often in both"
        + (f", {len(differing):,} not:" if differing else ""),
    ]
    for op in differing[:limit]:
        lines.append(f"≠ {plain(op):<{margin + width + 1}}{ops[0].get(op, 0):>9,}  {ops[1].get(op, 0):>9,}")
    if len(differing) > limit:
        lines.append(f"  and {len(differing) - limit:,} more: --limit {len(differing)}")
    lines += ["", f"Compare them:   tensorprobe compare {shell(paths[0])} {shell(paths[1])}"]
    return "\n".join(lines)


def _facts_of_both(runs: tuple[RunOverview, RunOverview]) -> Iterator[tuple[str, str, str]]:
    first, second = (dict(_facts_of(run)) for run in runs)
    for name in {**first, **second}:
        yield name, first.get(name, ""), second.get(name, "")


def _facts_of(run: RunOverview) -> Iterator[tuple[str, str]]:
    yield "steps", ranges(run.steps)
    yield "ranks", ranges(run.ranks)
    yield "calls", f"{run.calls:,}"
    yield "tensors", size(run.size_bytes)
    yield "closed", "yes" if run.closed else "no"
    if run.damaged:
        yield "damaged", f"{run.damaged:,} lines"
    yield "tool", run.tool
    yield "torch", run.torch
    yield "python", run.python
    yield "devices", ", ".join(sorted(set(run.devices.values())))
    yield "world size", str(run.world_size)
    for name, value in run.settings.items():
        if value not in (None, [], ""):
            yield name, str(value)
    coverage = run.coverage
    yield "coverage", f"{coverage.seen:,} seen, {coverage.recorded:,} recorded, {coverage.failed:,} failed"

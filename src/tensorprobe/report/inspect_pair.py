"""Two runs side by side: a line for each fact, marked where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tensorprobe.model.overview import RunOverview
from tensorprobe.text import counted, plain, ranges, shell, size

Both = tuple[RunOverview, RunOverview]
_WIDTH = 40


def render_two_runs(
    runs: Both, ops: tuple[Mapping[str, int], Mapping[str, int]], *, paths: tuple[str, str], limit: int = 20
) -> str:
    """Return the facts of both runs, then the ops that they call a different number of times."""
    width = max(_WIDTH, len(plain(paths[0])))
    facts = list(_facts(runs))
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


def _facts(runs: Both) -> Iterator[tuple[str, str, str]]:
    first, second = (dict(_of(run)) for run in runs)
    for name in {**first, **second}:
        yield name, first.get(name, ""), second.get(name, "")


def _of(run: RunOverview) -> Iterator[tuple[str, str]]:
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

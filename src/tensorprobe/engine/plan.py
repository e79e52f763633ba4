"""Pairs the steps and ranks of two runs into the tasks of a comparison, before any tensor is read.

Steps and ranks are paired by number. Those of only one run are not compared, but counted and reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from tensorprobe.engine.evidence import calls_of_each
from tensorprobe.engine.places import Side
from tensorprobe.engine.rank_task import RankTask
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import CannotCompare
from tensorprobe.judge.policy import check_policy
from tensorprobe.model.comparison import Ending
from tensorprobe.model.reason import Skipped
from tensorprobe.record import Run
from tensorprobe.record.endings import End, find_ends, lacks_rank
from tensorprobe.record.phases import demand_calls, of_phases
from tensorprobe.record.reader import open_run
from tensorprobe.text import ranges


@dataclass
class Plan:
    """The tasks, and what they leave out."""

    tasks: list[RankTask]
    policy: str
    steps: list[int]
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → number of calls that are not compared."""
    notes: list[str] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    """Where a run ends before the other."""

    def expected_calls(self, run: Run) -> int:
        """Return about how many pairs of calls there are to compare; 0 where the run does not say."""
        chosen = {(step, task.rank) for task in self.tasks for step, _ in task.steps}
        recorded = sum(coverage.recorded for coverage in run.coverage.values())
        return recorded * len(chosen) // max(1, len(run.segments()))

    def tasks_with_rows_in(self, folder: Path) -> list[RankTask]:
        """Return the tasks, each with its own file for rows in that folder."""
        return [
            msgspec.structs.replace(task, rows_file=str((folder / f"rows-rank{task.rank}.parquet").absolute()))
            for task in self.tasks
        ]


def plan_tasks(sides: tuple[Side, Side], settings: CompareSettings) -> Plan:
    """Return a task for each rank of both runs. Raises CannotCompare if there is none."""
    policy, map_text = settings.load_policy(), settings.read_map()
    check_policy(policy)
    for path in settings.noise:  # before anything is measured
        open_run(path)
    runs, steps, ranks = (sides[0].run, sides[1].run), settings.wanted_steps, settings.wanted_ranks
    segments = [{key for key in run.segments() if _wanted(key, steps, ranks)} for run in runs]
    _demand_asked(runs, steps, ranks)
    common = segments[0] & segments[1]
    if not common:
        raise CannotCompare(_nothing_in_common(sides, steps, ranks))
    for run in runs if settings.phases else ():
        demand_calls(of_phases(run, settings.phases), settings.phases)
    plan = Plan(tasks=[], policy=policy.name, steps=sorted({step for step, _ in common}))
    steps_of: dict[int, list[int]] = {}
    for step, rank in sorted(common):
        steps_of.setdefault(rank, []).append(step)
    ends = (find_ends(runs[0]), find_ends(runs[1]))
    for rank, at in sorted(steps_of.items()):
        plan.tasks.append(
            RankTask(
                baseline=sides[0].address,
                candidate=sides[1].address,
                baseline_data=sides[0].data,
                candidate_data=sides[1].data,
                rank=rank,
                candidate_rank=rank if runs[1].true_rank is None else runs[1].true_rank,
                steps=[(step, step if runs[1].true_step is None else runs[1].true_step) for step in at],
                whole=(_last_whole(ends[0].get(rank)), _last_whole(ends[1].get(rank))),
                policy=policy,
                map_text=map_text,
                noise=[str(Path(path).absolute()) for path in settings.noise],
                strip_prefix=settings.strip_prefix,
                fuzzy=settings.fuzzy,
                phases=settings.phases,
                prove=settings.prove,
                evidence=calls_of_each(len(steps_of)),
            )
        )
    for kind, other, own in (
        ("rank", runs[1].true_rank, plan.tasks[0].rank),
        ("step", runs[1].true_step, plan.steps[0]),
    ):
        if other is not None and other != own:
            plan.notes.append(f"{kind} {other} of the candidate is compared with {kind} {own} of the baseline")
    for name, run, mine in zip(("baseline", "candidate"), runs, segments, strict=True):
        _leave_out(plan, name, run, mine - common, common)
    plan.endings = [*_endings(0, runs, segments, ends, steps), *_endings(1, runs, segments, ends, steps)]
    return plan


def _last_whole(end: End | None) -> int | None:
    """Return the step after which a run was cut. One that ended itself was not: what it lacks is a difference."""
    return None if end is None or end.is_own else end.whole


def _endings(
    side: int,
    runs: tuple[Run, Run],
    segments: list[set[tuple[int, int]]],
    ends: tuple[dict[int, End], dict[int, End]],
    steps: Sequence[int] | None,
) -> Iterator[Ending]:
    """Yield where one run ends, if the other one, or nobody, has what follows."""
    name: Literal["baseline", "candidate"] = "candidate" if side else "baseline"
    for rank in sorted({rank for _, rank in segments[1 - side]}):
        end, other = ends[side].get(rank), ends[1 - side].get(rank)
        if end is None and lacks_rank(runs[side], rank):
            end = End(-1, "")
        if end is None or (other is not None and end.is_own and _ended_alike(end, other)):
            continue
        goes_on = any(step > end.whole for step, held in segments[1 - side] if held == rank)
        if goes_on or (other is not None and steps is None):
            cut = [step for step, held in segments[side] if held == rank and step > end.whole]
            yield Ending(run=name, rank=rank, whole=end.whole, step=min(cut, default=None), raised=end.raised)


def _ended_alike(end: End, other: End) -> bool:
    """Return whether the same exception ended both, after the same step."""
    return end.whole == other.whole and end.raised.partition(":")[0] == other.raised.partition(":")[0]


def _wanted(key: tuple[int, int], steps: Sequence[int] | None, ranks: Sequence[int] | None) -> bool:
    return (steps is None or key[0] in steps) and (ranks is None or key[1] in ranks)


def _demand_asked(runs: tuple[Run, Run], steps: Sequence[int] | None, ranks: Sequence[int] | None) -> None:
    """Raise CannotCompare for a requested step or rank that neither run has."""
    for kind, asked, held in (
        ("step", steps, [run.steps for run in runs]),
        ("rank", ranks, [run.ranks for run in runs]),
    ):
        lacking = [number for number in asked or () if number not in held[0] and number not in held[1]]
        if lacking:
            raise CannotCompare(
                f"no {kind} {ranges(lacking)} in either run. Baseline holds {kind}s {ranges(held[0]) or '(none)'}, "
                f"candidate {ranges(held[1]) or '(none)'}."
            )


def _leave_out(plan: Plan, name: str, run: Run, only: set[tuple[int, int]], common: set[tuple[int, int]]) -> None:
    """Count the calls of steps and ranks that the other run lacks."""
    ranks = {rank for _, rank in common}
    for kind, keys in (
        ("rank", sorted(key for key in only if key[1] not in ranks)),
        ("step", sorted(key for key in only if key[1] in ranks)),
    ):
        if not keys:
            continue
        calls = sum(len(run.segment(*key).index().entries) for key in keys)
        reason = Skipped(f"{kind} only in {name}").value
        plan.skipped[reason] = plan.skipped.get(reason, 0) + calls
        numbers = ranges(sorted({key[kind == "rank"] for key in keys}))
        plan.notes.append(f"{kind} {numbers} is only in the {name}: {calls:,} calls not compared")


def _nothing_in_common(sides: tuple[Side, Side], steps: Sequence[int] | None, ranks: Sequence[int] | None) -> str:
    runs = [side.run for side in sides]
    held = [f"steps {ranges(run.steps) or '(none)'} of ranks {ranges(run.ranks) or '(none)'}" for run in runs]
    asked = "".join(
        f" --{kind} {ranges(numbers)}" for kind, numbers in (("steps", steps), ("ranks", ranks)) if numbers is not None
    )
    return (
        f"no step of a rank is in both runs{f' with{asked}' if asked else ''}.\n"
        f"  Baseline '{sides[0].said}' holds {held[0]}, candidate '{sides[1].said}' {held[1]}."
    )

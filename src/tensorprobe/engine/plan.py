"""Pairs the steps and ranks of two runs into the tasks of a comparison, before any tensor is read.

Steps and ranks are paired by number. Those of only one run are not compared, but counted and reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tensorprobe.engine.places import Side
from tensorprobe.engine.rank_task import RankTask
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import CannotCompare
from tensorprobe.judge.policy import check_policy
from tensorprobe.model.reason import Skipped
from tensorprobe.record import Run
from tensorprobe.record.run import ranges


@dataclass
class Plan:
    """The tasks, and what they leave out."""

    tasks: list[RankTask]
    policy: str
    steps: list[int]
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → number of calls that are not compared."""
    notes: list[str] = field(default_factory=list)

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
    runs, steps, ranks = (sides[0].run, sides[1].run), settings.wanted_steps, settings.wanted_ranks
    segments = [{key for key in run.segments() if _wanted(key, steps, ranks)} for run in runs]
    _demand_asked(runs, steps, ranks)
    common = segments[0] & segments[1]
    if not common:
        raise CannotCompare(_nothing_in_common(sides, steps, ranks))
    plan = Plan(tasks=[], policy=policy.name, steps=sorted({step for step, _ in common}))
    steps_of: dict[int, list[int]] = {}
    for step, rank in sorted(common):
        steps_of.setdefault(rank, []).append(step)
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
                policy=policy,
                map_text=map_text,
                strip_prefix=settings.strip_prefix,
                fuzzy=settings.fuzzy,
                prove=settings.prove,
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
    return plan


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

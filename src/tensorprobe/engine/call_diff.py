"""`tensorprobe diff`: calls of two runs, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import msgspec

from tensorprobe.engine.places import Place, open_sides, runs_of
from tensorprobe.engine.plan import plan_tasks
from tensorprobe.engine.rank_task import RankTask
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import NotFound
from tensorprobe.model.comparison import Divergence
from tensorprobe.model.diff import CallDiff
from tensorprobe.pairing.align import Options
from tensorprobe.pairing.diff import CallPair, Runs, diff_call, partners
from tensorprobe.pairing.mapping import parse_mapping
from tensorprobe.record.stored import StoredCall
from tensorprobe.settings import public

MOST_CALLS = 200
"""Of more calls than this, the first are compared."""


@public
def diff(
    baseline: Place,
    candidate: Place,
    call: str,
    *,
    slot: str | None = None,
    step: int | None = None,
    rank: int | None = None,
    map: str | os.PathLike[str] | None = None,
    strip_prefix: str | None = None,
    fuzzy: bool = False,
) -> list[CallDiff]:
    """Compare the tensors of a call in two runs: the pattern of the error, its worst elements, its spread.

        for found in tensorprobe.diff("runs/cuda", "runs/npu", "Functional.softmax.0.forward"):
            print(found.tensor.pattern, found.tensor.worst)

    Args:
        baseline, candidate: as for `compare`.
        call: a name, the start of one, a glob, the path of a module, or `module:` and a path.
        slot: the tensor in detail, e.g. `output.0`. By default the output that differs most.
        step, rank: by default the first that has such a call.
        map, strip_prefix, fuzzy: how calls are paired, as for `compare`.

    Returns a `CallDiff` for each call that has a partner, at most 200. Raises NotFound if there is none.
    """
    settings = CompareSettings.of(map=map, strip_prefix=strip_prefix, fuzzy=fuzzy)
    with open_pairs(baseline, candidate, call, step=step, rank=rank, settings=settings) as (runs, pairs):
        return [diff_call(runs, pair, slot=slot) for pair in pairs]


def diff_pair(baseline: Place, candidate: Place, found: Divergence, *, slot: str | None = None) -> CallDiff:
    """Return the tensors of a divergence. NotFound if it is a call without a partner."""
    if not found.call or not found.candidate_call:
        raise NotFound(
            f"{found.call or found.candidate_call} is in one of the runs only: there is nothing to compare it with."
        )
    place = (found.step, found.rank, found.index)
    with open_call(baseline, candidate, found.call, found.candidate_call, place) as (runs, pair):
        return diff_call(runs, pair, slot=slot)


@contextmanager
def open_call(
    baseline: Place, candidate: Place, call: str, candidate_call: str, place: tuple[int, int, int]
) -> Iterator[tuple[Runs, CallPair]]:
    """Open both runs with the values of a call whose partner is known; `place` is its step, rank and line in the baseline."""
    step, rank, line = place
    with _open_place(baseline, candidate, call, step, rank, CompareSettings.of()) as opened:
        ours = next((each for each in opened.calls if each.index == line), opened.calls[0])
        there = {"step": opened.there[0], "rank": opened.there[1]}
        yield opened.runs, (ours, opened.runs[1].find(candidate_call, **there, repeat=ours.repeat)[0])


@contextmanager
def open_pairs(
    baseline: Place, candidate: Place, call: str, *, step: int | None, rank: int | None, settings: CompareSettings
) -> Iterator[tuple[Runs, list[CallPair]]]:
    """Open both runs with the values of the first step and rank that has such a call. NotFound if no call has a partner."""
    with _open_place(baseline, candidate, call, step, rank, settings) as (runs, place, there, task, calls):
        mapping = None if task.map_text is None else parse_mapping(task.map_text, source="the map")
        options = Options(mapping=mapping, strip_prefix=task.strip_prefix, fuzzy=task.fuzzy)
        pairs = partners(runs, calls, there, options)
        if not pairs:
            raise NotFound(f"{calls[0].name} has no partner in '{runs[1].path}' (step {place[0]}, rank {place[1]}).")
        yield runs, pairs


class _Opened(NamedTuple):
    """Both runs with their values, where the calls are in each, and the calls of the baseline."""

    runs: Runs
    place: tuple[int, int]
    there: tuple[int, int]
    task: RankTask
    calls: list[StoredCall]


@contextmanager
def _open_place(
    baseline: Place, candidate: Place, call: str, step: int | None, rank: int | None, settings: CompareSettings
) -> Iterator[_Opened]:
    chosen = replace(settings, steps=None if step is None else (step,), ranks=None if rank is None else (rank,))
    with open_sides(baseline, candidate, chosen) as sides:
        plan = plan_tasks(sides, chosen)
        found = sides[0].run.find(call, step=step, rank=rank)
        place = (found[0].step, found[0].rank)
        task = next((task for task in plan.tasks if task.rank == place[1]), None)
        there = None if task is None else dict(task.steps).get(place[0])
        if task is None or there is None:
            raise NotFound(
                f"{found[0].name} is in step {place[0]}, rank {place[1]} of '{sides[0].said}'; '{sides[1].said}' has no such one.\n"
                "  Choose others with --step and --rank."
            )
        lines = {each.index for each in found[:MOST_CALLS]}
        opened = {(side.address, side.data): side.opened for side in sides if side.opened is not None}
        with runs_of(msgspec.structs.replace(task, steps=[(place[0], there)]), opened) as runs:
            entries = [entry for entry in runs[0].segment(*place).index().entries if entry.line in lines]
            calls = [runs[0].at(*place, entry) for entry in entries]
            yield _Opened(runs, place, (there, task.candidate_rank), task, calls)

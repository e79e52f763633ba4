"""How a run ended: which ranks finished, and where the others stopped.

In: an open run. Out: an `End` for each rank that did not finish, and a sentence about them. A rank that was killed stops in
the middle of a step, or between two. Its part says which step was the last to end; a part of version 1 does not, and there
the last step that has calls counts as cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

from tensorprobe.errors import NotFound, RunDamaged
from tensorprobe.model import RankPart
from tensorprobe.record.draining import trainer_is_alive
from tensorprobe.record.run import Run
from tensorprobe.record.run_folder import attempts
from tensorprobe.text import counted, ranges

_OUTSIDE = ("KeyboardInterrupt", "SystemExit")
"""Exceptions that end a program although nothing is wrong with it."""
_SHOWN = 8
_MESSAGE = 100
"""Characters of an exception that are printed."""


class End(NamedTuple):
    """The place where a rank stopped."""

    whole: int
    """The last whole step; -1 when there is none."""
    raised: str
    """The exception that ended the program, or its exit code; empty when it was killed, or is still running."""

    @property
    def is_own(self) -> bool:
        """Whether the program ended by itself: then the calls that follow in the other run are a difference."""
        return bool(self.raised) and not self.raised.startswith(_OUTSIDE)


def find_ends(run: Run) -> dict[int, End]:
    """Return where each unfinished rank stopped."""
    steps_of: dict[int, list[int]] = {}
    for step, rank in run.segments():
        steps_of.setdefault(rank, []).append(step)
    wanted = _numbers(run.manifest.settings.get("steps"))
    ends = {}
    for rank, part in run.parts.items():
        if part.closed and not part.raised:
            if code := run.manifest.exit_code:  # what it has is whole; what the other run has beyond it is missing
                ends[rank] = End(max(steps_of.get(rank, ()), default=-1), f"exit code {code}")
            continue
        whole = _last_whole(part, steps_of.get(rank, ()))
        if not part.raised and wanted and whole >= max(wanted):
            continue  # it was ended after everything that was asked for
        ends[rank] = End(whole, part.raised)
    return ends


def lacks_rank(run: Run, rank: int) -> bool:
    """Return whether this rank was selected and left nothing. A dump of another tool need not hold every rank."""
    if rank in run.ranks or rank >= run.manifest.world_size or not any(part.pid for part in run.parts.values()):
        return False
    chosen = _numbers(run.manifest.settings.get("ranks"))
    return chosen is None or rank in chosen


def _last_whole(part: RankPart, steps: Sequence[int]) -> int:
    if part.ended is not None:
        return part.ended
    return -1 if part.closed else max(steps[:-1], default=-1)


def _numbers(setting: Any) -> list[int] | None:
    """Return a setting that lists steps or ranks; None when there is no such list."""
    if not isinstance(setting, list) or not all(isinstance(number, int) for number in setting):
        return None
    return setting


def describe_end(run: Run) -> str | None:
    """Return which steps of a run that did not finish are whole, and what the next one holds; None for a run that finished."""
    ends = find_ends(run)
    again = "".join(f" It was started again: '{attempt}'." for attempt in attempts(run.path)[-1:])
    if not ends:
        return f"'{run.path}' was closed.{again}" if again else None
    if all(part.closed and not part.raised for part in run.parts.values()):
        return f"'{run.path}' {_how(run, ends)}.{again}"
    edge = min(end.whole for end in ends.values())
    whole, after = ([step for step in run.steps if (step <= edge) is is_whole] for is_whole in (True, False))
    parts = []
    if whole:
        parts.append(
            f"step{'s' if len(whole) > 1 else ''} {ranges(whole)} {'are' if len(whole) > 1 else 'is'} complete"
        )
    if after:
        counts = ", ".join(_calls_on(run, after[0], rank) for rank in run.ranks[:_SHOWN])
        parts.append(f"step {after[0]} has {counts}{', …' if len(run.ranks) > _SHOWN else ''}")
    said = "; ".join(parts) or "It holds no calls"
    return f"'{run.path}' {_how(run, ends)}. {said[0].upper()}{said[1:]}.{again}"


def _how(run: Run, ends: Mapping[int, End]) -> str:
    alive = sorted(part.pid for part in run.parts.values() if trainer_is_alive(part))
    if alive:
        return f"is still being recorded (process {', '.join(map(str, alive))})"
    of: dict[str, list[int]] = {}
    for rank, end in ends.items():
        if end.raised:
            of.setdefault(shorten(end.raised, _MESSAGE, placeholder=" …"), []).append(rank)
    if not of:
        return "was never closed"
    # Ranks that wait for one that failed end with longer messages than that one.
    many = [f"{raised} (rank {ranges(of[raised])})" for raised in sorted(of, key=len)]
    return f"ended with {', '.join(many[:_SHOWN]) if len(of) > 1 else next(iter(of))}"


def _calls_on(run: Run, step: int, rank: int) -> str:
    try:
        calls = len(run.segment(step, rank).index().entries)
    except (NotFound, RunDamaged):
        calls = 0
    return f"{counted(calls, 'call')} on rank {rank}" if calls else f"none on rank {rank}"

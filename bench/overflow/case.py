"""A planted overflow: a small program, and what a watch over it must say. For bench.overflow and the tests.

Expected findings are written by hand, not taken from the tool: `Torch.log.0.forward inf` is a call and the kind of finding.
` step 2`, ` rank 1` and ` abnormal` follow if they are not the default. Any other finding is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorprobe.model.overflow import Arrival, FirstNonfinite
from tensorprobe.watches.overflow import OverflowWatch

Watching = Callable[..., OverflowWatch]
"""`with watching(model, allow=...)`: a watch with a folder of its own."""
Program = Callable[[Watching], None]


@dataclass(frozen=True)
class Planted:
    """A program with its expected findings and arrivals, in order; `skipped`: by a GradScaler."""

    name: str
    program: Program
    first_nonfinite: tuple[str, ...] = ()
    arrivals: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What was expected and what was reported: findings and arrivals."""

    name: str
    expected: list[str]
    told: list[str]
    error: str = ""

    @property
    def missed(self) -> list[str]:
        return [each for each in self.expected if each not in self.told]

    @property
    def false(self) -> list[str]:
        return [each for each in self.told if each not in self.expected]

    @property
    def exact(self) -> bool:
        return self.told == self.expected and not self.error


def plants(
    into: dict[str, Planted], *first_nonfinite: str, arrivals: tuple[str, ...] = (), skipped: tuple[str, ...] = ()
) -> Callable[[Program], Program]:
    """Puts a program into a table, with what it must say."""

    def add(program: Program) -> Program:
        into[program.__name__] = Planted(program.__name__, program, first_nonfinite, arrivals, skipped)
        return program

    return add


def told_first(first: FirstNonfinite) -> str:
    """Return a finding in the spelling of `Planted`."""
    abnormal = " abnormal" if first.verdict == "abnormal" else ""
    return f"{first.call} {first.kind}{_where(first)}{abnormal}"


def told_arrival(arrival: Arrival) -> str:
    """An arrival as it is expected."""
    return f"{arrival.call} had {arrival.what}{_where(arrival)}"


def _where(fact: FirstNonfinite | Arrival) -> str:
    return (f" step {fact.step}" if fact.step else "") + (f" rank {fact.rank}" if fact.rank else "")


def expected_of(planted: Planted) -> list[str]:
    """All that must be told."""
    return [*planted.first_nonfinite, *planted.arrivals, *(f"{call} skipped" for call in planted.skipped)]


def watch_planted(planted: Planted, folder: Path) -> Outcome:
    """Run a program under a watch, and read what it told."""
    watches: list[OverflowWatch] = []

    def watching(model: Any = None, **settings: Any) -> OverflowWatch:
        watches.append(OverflowWatch(model, out=folder / planted.name, **settings))
        return watches[-1]

    planted.program(watching)
    (watch,) = watches
    report = watch.result.summary
    told = [told_first(first) for first in report.first_nonfinite] + [
        told_arrival(arrival) for arrival in report.arrivals
    ]
    told += [f"{call} skipped" for call in report.skipped_by_scaler]
    error = "; ".join(note for note in report.notes if "could not be" in note or "raised" in note)
    return Outcome(planted.name, expected_of(planted), told, error)

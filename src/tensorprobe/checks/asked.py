"""What was asked for: every setting of a precheck besides the run and the output, checked when it is made.

A wrong value is a SettingsError before anything is read. Whether there are such a device and such a standard is not known
here but in the processes that need them, so that this one need not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensorprobe.errors import SettingsError
from tensorprobe.settings import parse_numbers

Numbers = str | int | Iterable[int]
Names = str | Iterable[str]

_FREE = ("jobs", "time_limit_s")
"""Settings that change nothing about a finished check: a precheck may be continued with others."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a precheck; after it was made, `calls` is a tuple of patterns, `steps` and `ranks` of numbers."""

    device: str = "cpu"
    data: str = "random"
    standard: str = "noise-aware"
    calls: Any = None
    steps: Any = None
    ranks: Any = None
    dedupe: bool = True
    backward: bool = True
    hard: bool = False
    save_failures: bool = False
    jobs: int = 1
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.data not in ("random", "real"):
            raise SettingsError(f"data is {self.data!r}; it must be random or real.")
        if isinstance(self.jobs, bool) or not isinstance(self.jobs, int) or self.jobs < 0:
            raise SettingsError(
                f"jobs is {self.jobs!r}; it must be a whole number from 1 on, or 0 to run the calls in this process."
            )
        if not self.time_limit_s > 0:
            raise SettingsError(f"the time limit is {self.time_limit_s!r} seconds; it must be more than 0.")
        for key in ("steps", "ranks"):
            given = getattr(self, key)
            if given is not None:
                object.__setattr__(self, key, parse_numbers(given, key))
        if self.calls is not None:
            object.__setattr__(self, "calls", _names(self.calls))

    def remembered(self) -> dict[str, Any]:
        """The settings that a result depends on, as a journal holds them."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
            if key not in _FREE
        }


def _names(given: Names) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise SettingsError(
            f"calls takes names such as Functional.conv2d.1 or globs such as '*.linear.*'; got {given!r}."
        )
    return names

"""How a comparison is asked for: every setting besides the two runs and the output, checked when it is made.

`compare`, `compare_shard` and the command take the same ones. A wrong value or a combination that makes no sense is a
SettingsError before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.judge import Policy, load_policy
from tensorprobe.pairing.mapping import read_mapping
from tensorprobe.settings import parse_numbers
from tensorprobe.work.pool import processors

Numbers = str | int | Iterable[int]
Engine = Literal["local", "ray"]
TableForm = Literal["parquet", "csv"]

_ENGINES = ("local", "ray")
_TABLES = ("parquet", "csv")


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """The settings as given. `checked` values are behind the properties."""

    policy: str | Policy = "noise-aware"
    steps: Numbers | None = None
    ranks: Numbers | None = None
    map: str | os.PathLike[str] | None = None
    strip_prefix: str | None = None
    fuzzy: bool = False
    threads: int | None = None
    jobs: int = 1
    engine: Engine = "local"
    address: str | None = None
    table: TableForm = "parquet"
    workbook: bool = False

    def __post_init__(self) -> None:
        _demand_positive(self.jobs, "jobs")
        if self.threads is not None:
            _demand_positive(self.threads, "threads")
        _demand_one_of(self.engine, "engine", _ENGINES)
        _demand_one_of(self.table, "table", _TABLES)
        for kind, given in (("steps", self.steps), ("ranks", self.ranks)):
            if given is not None:
                object.__setattr__(self, kind, parse_numbers(given, kind))
        if self.engine == "local" and self.address is not None:
            raise SettingsError(
                f"address {self.address!r} is that of a Ray cluster: it needs engine 'ray' (--engine ray)."
            )
        if self.engine == "ray" and self.jobs > 1 and self.address != "local":
            raise SettingsError(
                f"jobs is {self.jobs} with engine 'ray': a cluster decides by itself how many ranks it compares at once.\n"
                "  Leave out one of them; with address 'local' jobs are the processors that Ray may use."
            )

    @property
    def wanted_steps(self) -> tuple[int, ...] | None:
        """The steps that were asked for; None for all."""
        return self.steps  # type: ignore[return-value]  # __post_init__ has parsed them

    @property
    def wanted_ranks(self) -> tuple[int, ...] | None:
        """The ranks that were asked for; None for all."""
        return self.ranks  # type: ignore[return-value]

    @property
    def leaves_process(self) -> bool:
        """Whether tasks run in other processes than this one."""
        return self.engine == "ray" or self.jobs > 1

    def load_policy(self) -> Policy:
        """The rules behind the policy's name."""
        return self.policy if isinstance(self.policy, Policy) else load_policy(self.policy)

    def read_map(self) -> str | None:
        """The text of the map, checked here so that a mistake in it is found before anything is read."""
        if self.map is None:
            return None
        read_mapping(Path(self.map))
        return Path(self.map).read_text(encoding="utf-8")

    def threads_for(self, tasks: int) -> int:
        """Threads of each of so many tasks: the processors of this machine are divided among those that run at once."""
        if self.threads is not None:
            return self.threads
        return 1 if self.engine == "ray" else max(1, processors() // min(self.jobs, max(tasks, 1)))


def _demand_positive(number: Any, name: str) -> None:
    if not isinstance(number, int) or number < 1:
        raise SettingsError(f"{name} is {number!r}; it must be a whole number from 1 on.")


def _demand_one_of(given: Any, name: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise SettingsError(f"{name} is {given!r}; it must be {' or '.join(known)}.{did_you_mean(str(given), known)}")

"""The settings of a comparison. `compare`, `compare_shard` and the command take the same ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from tensorprobe.errors import SettingsError
from tensorprobe.judge import POLICIES, Policy, load_policy
from tensorprobe.model.call import PHASES
from tensorprobe.settings import Numbers, Settings, flag, one_of, parse_numbers, setting, some_of, whole

Engine = Literal["local", "ray"]
Prove = Literal["auto", "all", "off"]
TableForm = Literal["parquet", "csv"]

__all__ = ["CompareSettings", "Engine", "Numbers", "Prove", "TableForm"]


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """Every setting of a comparison besides the two runs and the output folder."""

    policy: str | Policy = setting(
        "noise-aware", f"{', '.join(POLICIES)}, or the path of a .toml file with your own rules."
    )
    steps: Any = setting(None, "Compare only these steps, e.g. 0,2-4. Default: all.", parse_numbers)
    ranks: Any = setting(
        None, "Compare only these ranks, e.g. 0,2-4. Rank i is compared with rank i. Default: all.", parse_numbers
    )
    phases: Any = setting(
        None, f"Compare only calls of this phase: {', '.join(PHASES)}. Default: all.", some_of(*PHASES)
    )
    map: str | os.PathLike[str] | None = setting(
        None, "A file of name pairs: calls or modules of the baseline and their names in the candidate."
    )
    noise: list[str] = setting(
        (),
        "Another correct run of the baseline's program: differences between the two are allowed, call by call. May be given several times.",
    )
    strip_prefix: str | None = setting(None, "Strip this prefix from module paths, e.g. module.")
    fuzzy: bool = setting(False, "Pair calls of the same op in order, even if their numbers differ.", flag)
    strict: bool = setting(
        False, "Exit code 1 also when the runs make different calls that give the same results.", flag
    )
    prove: Prove = setting(
        "auto",
        "Replay calls that differ in float64 on both sides, up to the first proved fault: auto (within a budget of 2,000 "
        "calls and 2 GiB for each rank), all, or off. Needs values and the policy noise-aware.",
        one_of("auto", "all", "off"),
    )
    threads: int | None = setting(
        None, "Threads that measure tensors of one rank. Default: all processors, divided among the jobs.", whole(1)
    )
    jobs: int = setting(1, "Number of processes on this machine. Each compares whole ranks.", whole(1))
    engine: Engine = setting(
        "local", "Where ranks are compared: local, or ray (an existing Ray cluster).", one_of("local", "ray")
    )
    address: str | None = setting(
        None, "Address of the Ray cluster: auto (the default), ray://host:port, or local for one on this machine."
    )
    table: TableForm = setting("parquet", "Format of the result table: parquet or csv.", one_of("parquet", "csv"))
    workbook: bool = setting(False, "Also write result.xlsx.", flag)

    def check_together(self) -> None:
        """Only a Ray cluster has an address, and it manages its own processes."""
        if self.engine == "local" and self.address is not None:
            raise SettingsError(
                f"address {self.address!r} is the address of a Ray cluster: it needs engine 'ray' (--engine ray)."
            )
        if self.engine == "ray" and self.jobs > 1 and self.address != "local":
            raise SettingsError(
                f"jobs is {self.jobs} with engine 'ray', but the cluster decides how many ranks it compares at once.\n"
                "  Leave out one of them. With address 'local', jobs is the number of processors that Ray may use."
            )

    @property
    def wanted_steps(self) -> tuple[int, ...] | None:
        """The requested steps; None for all."""
        chosen: tuple[int, ...] | None = self.steps
        return chosen

    @property
    def wanted_ranks(self) -> tuple[int, ...] | None:
        """The requested ranks; None for all."""
        chosen: tuple[int, ...] | None = self.ranks
        return chosen

    @property
    def leaves_process(self) -> bool:
        """Whether tasks run in other processes."""
        return self.engine == "ray" or self.jobs > 1

    def load_policy(self) -> Policy:
        """Return the rules of the policy."""
        return self.policy if isinstance(self.policy, Policy) else load_policy(self.policy)

    def read_map(self) -> str | None:
        """Return the text of the map, checked before anything else is read."""
        if self.map is None:
            return None
        from tensorprobe.pairing.mapping import read_map_text

        return read_map_text(self.map)

    def threads_for(self, tasks: int) -> int:
        """Return the threads of each task: concurrent tasks share the processors of this machine."""
        if self.threads is not None:
            return self.threads
        from tensorprobe.work.pool import processors  # needs multiprocessing, which --help does not

        return 1 if self.engine == "ray" else max(1, processors() // min(self.jobs, max(tasks, 1)))

"""The settings of an online compare. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import SettingsError
from tensorprobe.settings import Settings, flag, name_list, one_of, parse_bytes, parse_numbers, setting, whole

if TYPE_CHECKING:
    from tensorprobe.judge import Policy

REFERENCES = {"cpu": "own", "cpu-fp32": "single", "cpu-fp64": "double"}


@dataclass(frozen=True, kw_only=True)
class OnlineSettings(Settings):
    """Every setting of an online compare besides the model."""

    out: str | os.PathLike[str] | None = setting(None, "Folder for the report and the failing calls.")
    reference: str = setting(
        "cpu-fp64",
        "What each call is compared with: the same call on the CPU in its own precision (cpu), in float32 (cpu-fp32) "
        "or in float64 (cpu-fp64).",
        one_of(*REFERENCES),
    )
    policy: str | os.PathLike[str] | Policy = setting(
        "noise-aware", "How differences are judged: the name of a policy, or the path of a .toml file."
    )
    on_fail: str = setting(
        "save", "save: write the inputs and outputs of failing calls to out. report: only report them.",
        one_of("save", "report"),
    )  # fmt: skip
    stop_after: int | None = setting(None, "Raise TrainingStopped after this many failing calls.", whole(1))
    heal: bool = setting(
        False, "Replace the result of a failing call by the reference's, so that training goes on.", flag
    )
    chain: bool = setting(
        False, "Follow the error from call to call: how much is inherited, how much introduced.", flag
    )
    every: int = setting(1, "Compare every n-th call of each op.", whole(1))
    once_per_kind: bool = setting(False, "Compare one call for each combination of op, dtypes and shapes.", flag)
    ops: tuple[str, ...] = setting(
        (), "Compare only ops whose name contains this text or matches it as a glob.", name_list
    )
    modules: tuple[str, ...] = setting(
        (), "Compare only calls made in modules whose path contains this text or matches it as a glob.", name_list
    )
    steps: Any = setting(None, "Compare only these steps, e.g. 0,2-4. Default: all.", parse_numbers)
    libraries: tuple[str, ...] = setting((), "Also compare ops of these torch.library namespaces.", name_list)
    workers: int = setting(0, "Threads that run the reference. 0 runs it in the training thread.", whole(0))
    budget: int = setting(
        "1GB", "Memory for calls that wait for a worker. Training waits while it is full.", parse_bytes
    )
    most_saved: int = setting(100, "Maximum number of failing calls that are saved.", whole(0))
    overwrite: bool = setting(False, "Replace the results of an earlier online compare in the folder.", flag)

    def check_together(self) -> None:
        """Saving needs a folder; healing and chaining need every result at once."""
        if self.on_fail == "save" and self.out is None:
            raise SettingsError(
                "on_fail is 'save', but out is not given. Pass out=FOLDER for the failing calls, or on_fail='report'."
            )
        if self.heal and self.workers:
            raise SettingsError(
                f"heal needs the reference's result at once and cannot be used with workers={self.workers}."
            )
        if self.chain and (self.workers or self.every != 1 or self.once_per_kind):
            raise SettingsError(
                "chain follows every call in order and cannot be used with workers, every or once_per_kind."
            )

"""The settings of a precheck.

Whether the device exists is found out in the processes that run the calls, so that this one need not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tensorprobe.errors import SettingsError
from tensorprobe.replay.isolation import TIME_LIMIT_S
from tensorprobe.settings import Settings, above, flag, name_list, one_of, parse_bytes, parse_numbers, setting, whole

Data = Literal["random", "real"]

_FREE = ("jobs", "time_limit_s", "max_replay_bytes")
"""Settings that change nothing about a finished check: a precheck may be resumed with other values."""


def _calls(given: Any, key: str) -> tuple[str, ...]:
    chosen = name_list(given, key)
    if not chosen:
        raise SettingsError(
            f"{key} is empty; expected names such as Functional.conv2d.1 or globs such as '*.linear.*'."
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class PrecheckSettings(Settings):
    """Every setting of a precheck besides the run and the output folder."""

    device: str = setting("cpu", "The device under test, as torch names it: cpu, cuda, npu:1.")
    data: Data = setting(
        "random",
        "Inputs of the calls: random (from the recorded dtypes, shapes and ranges) or real (the recorded values).",
        one_of("random", "real"),
    )
    standard: str = setting("noise-aware", "How results are judged: noise-aware, seed, binary, absolute or ulp.")
    calls: Any = setting(None, "Check only these calls: Functional.conv2d.1, or a glob such as '*.linear.*'.", _calls)
    steps: Any = setting(None, "Check these steps, e.g. 0,2-4. Default: the first step.", parse_numbers)
    ranks: Any = setting(None, "Check only these ranks, e.g. 0,2-4. Default: all.", parse_numbers)
    dedupe: bool = setting(True, "Run equal calls once.", flag)
    backward: bool = setting(True, "Check gradients too.", flag)
    hard: bool = setting(
        False, "Add edge-case inputs: zeros, subnormals, values near overflow, ties, non-contiguous tensors.", flag
    )
    save_failures: bool = setting(False, "Save each failing call with a script that runs it alone.", flag)
    jobs: int = setting(
        1, "Number of processes. 0 runs the calls in this process, without protection from crashes.", whole(0)
    )
    time_limit_s: float = setting(
        TIME_LIMIT_S, "Seconds after which a call that is still running has failed.", above(0)
    )
    max_replay_bytes: Any = setting(
        None,
        "Skip calls whose replay would need more memory, e.g. 4G. Default: a quarter of this machine's.",
        parse_bytes,
    )

    def remembered(self) -> dict[str, Any]:
        """Return the settings that a result depends on, as a journal holds them."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
            if key not in _FREE
        }

"""The settings of an overflow watch, and of a search in a recorded run. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tensorprobe.settings import Settings, above, flag, name_list, parse_bytes, parse_numbers, setting, whole

SEARCH = ("steps", "ranks", "allow", "near", "replay", "max_replay_bytes")
"""The settings that a search in a recorded run takes too. The others are about a program at work."""


@dataclass(frozen=True, kw_only=True)
class OverflowSettings(Settings):
    """Every setting besides the model or the run."""

    out: str | os.PathLike[str] | None = setting(None, "Folder for what a watch finds, as it happens.")
    steps: Any = setting(None, "Look only at these steps, e.g. 0,2-4. Default: all.", parse_numbers)
    ranks: Any = setting(None, "Look only at these ranks, e.g. 0,2-4. Default: all.", parse_numbers)
    allow: tuple[str, ...] = setting((), "Never report these ops, calls or modules. Globs work.", name_list)
    near: float | None = setting(
        None,
        "Also report outputs near the limit of their dtype: near=2 reports outputs beyond half of the limit.",
        above(1, note=": near=2 reports outputs beyond half of the limit"),
    )
    replay: bool = setting(
        True,
        "Run the first bad calls again in higher precision, to tell device faults from numbers that are too large.",
        flag,
    )
    max_replay_bytes: Any = setting(
        None,
        "Do not replay recorded calls that would need more memory, e.g. 4G. Default: a quarter of this machine's.",
        parse_bytes,
    )
    stop_after: int | None = setting(None, "Raise TrainingStopped after this many findings.", whole(1))
    ring: int = setting(64, "How many of the last calls are kept for a process that is killed.", whole(1, 1 << 20))
    under_scaler: bool = setting(False, "Also report overflows in steps that a GradScaler skips.", flag)
    saturation: bool = setting(True, "Report outputs that are stuck at the greatest number of their dtype.", flag)
    status: bool = setting(True, "Read the overflow register of the device, if it has one.", flag)
    keep: tuple[str, ...] = setting(
        (), "Keep copies of the inputs of these ops, so that in-place calls can be replayed.", name_list
    )
    keep_bytes: int = setting("64M", "Maximum memory for such copies.", parse_bytes)
    overwrite: bool = setting(False, "Replace the findings of an earlier watch in the folder.", flag)

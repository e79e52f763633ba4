"""The settings of a capture. Nothing here imports torch: the command line reads this table too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tensorprobe.errors import SettingsError
from tensorprobe.model import CaptureLevel
from tensorprobe.model.call import PHASES
from tensorprobe.settings import (
    Settings,
    flag,
    name_list,
    one_of,
    parse_bytes,
    parse_numbers,
    setting,
    some_of,
    two_names,
)

Mode = Literal["summary", "tensor", "structure"]

LEVELS = tuple(map(str, CaptureLevel))
MODES: tuple[str, ...] = get_args(Mode)
DIRECTIONS = ("forward", "backward")
SIDES = ("input", "output")

_LEAST_RING = 1 << 20


def _level(given: Any, key: str) -> CaptureLevel:
    return CaptureLevel(one_of(*LEVELS)(given, key))


def _ring(given: Any, key: str) -> int:
    count = parse_bytes(given, key)
    if count < _LEAST_RING:
        raise SettingsError(f"{key} is {count:,}; expected at least 1 MiB ({_LEAST_RING}).")
    return count


@dataclass(frozen=True, kw_only=True)
class CaptureSettings(Settings):
    """What a probe records."""

    level: CaptureLevel = setting(
        "api",
        "What counts as a call: module, api, aten, or mix (modules and API calls, each with its parent).",
        _level,
    )
    mode: str = setting(
        "tensor",
        "How much of each tensor to record: summary (statistics and digest), tensor (also the values) or structure "
        "(names and shapes only).",
        one_of(*MODES),
    )
    steps: tuple[int, ...] | None = setting(None, "Record only these steps, e.g. 0,2-4. Default: all.", parse_numbers)
    ranks: tuple[int, ...] | None = setting(None, "Record only these ranks, e.g. 0,2-4. Default: all.", parse_numbers)
    phases: tuple[str, ...] | None = setting(
        None, f"Record only calls of this phase: {', '.join(PHASES)}. Default: all.", some_of(*PHASES)
    )
    directions: tuple[str, ...] = setting(DIRECTIONS, "Record forward, backward, or both.", some_of(*DIRECTIONS))
    sides: tuple[str, ...] = setting(SIDES, "Record the input, the output, or both.", some_of(*SIDES))
    names: tuple[str, ...] = setting(
        (),
        "Record only calls with these names: Functional.conv2d.1 for both directions, Functional.conv2d.1.forward for one.",
        name_list,
    )
    span: tuple[str, str] | None = setting(
        None, "Record only the calls from the first name to the second, both included.", two_names
    )
    ops: tuple[str, ...] = setting(
        (), "Record only ops whose name contains this text or matches it as a glob.", name_list
    )
    modules: tuple[str, ...] = setting(
        (), "Record only calls made in modules whose path contains this text or matches it as a glob.", name_list
    )
    inside: tuple[str, ...] = setting(
        (), "Record only ATen calls made inside these API calls. Needs level aten.", name_list
    )
    floating_only: bool = setting(False, "Record values and statistics of floating and complex tensors only.", flag)
    max_bytes: int | None = setting(
        None,
        "Maximum bytes of values, over all ranks, e.g. 512M or 2G. After that only summaries are recorded.",
        parse_bytes,
    )
    stacks: bool | None = setting(
        None, "Record the Python stack of each call. Default: on, except in summary mode.", flag
    )
    ring_bytes: int = setting(
        128 << 20, "Memory for tensors on their way to the disk. Training waits while it is full.", _ring
    )
    in_process: bool = setting(
        False, "Write from a thread of the training process instead of a separate process.", flag
    )

    def check_together(self) -> None:
        """`inside` needs ATen calls."""
        if self.inside and not self.level.has_aten:
            raise SettingsError(
                f"inside selects ATen calls by the API call that makes them, but level is '{self.level}'.\n"
                "  Set level='aten', or select the API calls themselves with names."
            )

    @property
    def wants_stacks(self) -> bool:
        """Return whether to record stacks: by default yes, except in summary mode, where they would cost more than the rest."""
        return self.mode != "summary" if self.stacks is None else self.stacks

"""The settings of a precheck and of an audit.

Whether the device exists is found out in the processes that run the calls, so that this one need not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tensorprobe.errors import SettingsError
from tensorprobe.replay.isolation import TIME_LIMIT_S
from tensorprobe.replay.references import parse_references
from tensorprobe.settings import (
    Settings,
    above,
    flag,
    name_list,
    one_of,
    parse_bytes,
    parse_numbers,
    setting,
    two_names,
    whole,
)

Data = Literal["random", "real"]

_FREE = ("jobs", "time_limit_s", "max_replay_bytes", "budget", "engine", "address")
"""Settings that change nothing about a finished check: a precheck may be resumed with other values."""


def _calls(given: Any, key: str) -> tuple[str, ...]:
    chosen = name_list(given, key)
    if not chosen:
        raise SettingsError(
            f"{key} is empty; expected names such as Functional.conv2d.1 or globs such as '*.linear.*'."
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class SharedSettings(Settings):
    """What a precheck and an audit have in common."""

    recorded: ClassVar[bool]
    """Whether the recorded results are judged, instead of those of a device."""
    standard: str = setting("noise-aware", "How results are judged: noise-aware, seed, binary, absolute or ulp.")
    calls: Any = setting(None, "Check only these calls: Functional.conv2d.1, or a glob such as '*.linear.*'.", _calls)
    ranks: Any = setting(None, "Check only these ranks, e.g. 0,2-4. Default: all.", parse_numbers)
    dedupe: bool = setting(True, "Run equal calls once.", flag)
    backward: bool = setting(True, "Check gradients too.", flag)
    save_failures: bool = setting(False, "Save each failing call with a script that runs it alone.", flag)
    jobs: int = setting(
        1, "Number of processes. 0 runs the calls in this process, without protection from crashes.", whole(0)
    )
    time_limit_s: float = setting(
        TIME_LIMIT_S, "Seconds after which a call that is still running has failed.", above(0, most=1e9)
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


@dataclass(frozen=True, kw_only=True)
class PrecheckSettings(SharedSettings):
    """Every setting of a precheck besides the run and the output folder."""

    recorded = False
    modules: ClassVar[None] = None
    sample: ClassVar[None] = None
    budget: ClassVar[None] = None
    references: ClassVar[None] = None
    span: ClassVar[None] = None
    engine: ClassVar[str] = "local"
    address: ClassVar[None] = None
    device: Any = setting(
        None, "The device under test, as torch names it: cpu, cuda, npu:1. Default: the one the run was recorded on."
    )
    data: Data = setting(
        "random",
        "Inputs of the calls: random (from the recorded dtypes, shapes and ranges) or real (the recorded values).",
        one_of("random", "real"),
    )
    steps: Any = setting(None, "Check these steps, e.g. 0,2-4. Default: the first step.", parse_numbers)
    imports: Any = setting(
        (), "Import this module in every process that runs calls: it registers your own ops.", name_list
    )
    hard: bool = setting(
        False, "Add edge-case inputs: zeros, subnormals, values near overflow, ties, non-contiguous tensors.", flag
    )


def _share(given: Any, key: str) -> float:
    share = above(0)(given, key)
    if share > 1:
        raise SettingsError(f"{key} is {given!r}; expected a share between 0 and 1, such as 0.1.")
    return float(share)


def _seconds(given: Any, key: str) -> float:
    """`90`, `90s`, `5m` or `1h` in seconds."""
    text = str(given).strip().lower()
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        return float(above(0)(float(text[:-1] if factor else text) * (factor or 1), key))
    except ValueError:
        raise SettingsError(f"{key} is {given!r}; expected a time such as 90s, 5m or 1h.") from None


@dataclass(frozen=True, kw_only=True)
class AuditSettings(SharedSettings):
    """Every setting of an audit besides the run and the output folder."""

    recorded = True
    device: ClassVar[str] = "cpu"
    data: ClassVar[Data] = "real"
    hard: ClassVar[bool] = False
    imports: ClassVar[tuple[str, ...]] = ()
    steps: Any = setting(None, "Audit only these steps, e.g. 0,2-4. Default: all.", parse_numbers)
    modules: Any = setting(None, "Audit only calls inside these modules: layers.3, or a glob such as '*.attn'.", _calls)
    span: Any = setting(None, "Audit only the calls from the first name to the second, both included.", two_names)
    sample: Any = setting(None, "Audit only this share of the calls, e.g. 0.1. The same calls every time.", _share)
    budget: Any = setting(
        None, "Stop after this time, e.g. 90s or 5m, and report how many calls were not reached.", _seconds
    )
    references: Any = setting(
        None,
        "Compute an op without a CPU kernel by this function: NAME=module:function.",
        parse_references,
    )
    engine: str = setting(
        "local", "Where calls are audited: local, or ray (an existing Ray cluster).", one_of("local", "ray")
    )
    address: str | None = setting(
        None, "Address of the Ray cluster: auto (the default), ray://host:port, or local for one on this machine."
    )

    def check_together(self) -> None:
        """Only a Ray cluster has an address."""
        if self.engine == "local" and self.address is not None:
            raise SettingsError(
                f"address {self.address!r} is the address of a Ray cluster: it needs engine 'ray' (--engine ray)."
            )


Asked = PrecheckSettings | AuditSettings

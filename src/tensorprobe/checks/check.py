"""One call of a run, run alone on the device and on the reference, forward and backward, and judged.

In: a recorded forward call, its recorded backward when there is one. Out: a `CallCheck`. A call that cannot be run is
skipped with the reason; an exception of the op on the device alone is a failure of the op, not of the check.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.judge.standards import STANDARDS
from tensorprobe.model.precheck import CallCheck, Checked, Passed
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.hard import VARIANTS, Unsuitable, make_variant
from tensorprobe.replay.inputs import Data
from tensorprobe.replay.runs import Conditions, DeviceRaised, Runs, passed_over, prepare


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How calls are checked. `hard` adds inputs at the edges of what the dtype holds."""

    device: str = "cpu"
    data: Data = "random"
    standard: str = "noise-aware"
    backward: bool = True
    hard: bool = False

    def __post_init__(self) -> None:
        if self.standard not in STANDARDS:
            raise SettingsError(
                f"no standard {self.standard!r}. There are: {', '.join(STANDARDS)}.{did_you_mean(self.standard, STANDARDS)}"
            )
        if self.data not in ("random", "real"):
            raise SettingsError(f"data is {self.data!r}; it must be random or real.")
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise SettingsError(f"device {self.device!r} cannot be used: {str(error).splitlines()[0]}") from None

    def conditions(self, variant: str = "") -> Conditions:
        """What `Runs` needs to know of them."""
        return Conditions(self.device, self.data, self.standard, variant)


def check_call(call: StoredCall, backward: StoredCall | None, settings: CheckSettings) -> CallCheck:
    """The verdict on one call."""
    started = time.perf_counter()
    details: list[Checked] = []
    reason = data = ""
    try:
        runs, data = prepare(call, settings.conditions())
        details += _check(runs, backward, settings, "")
        if settings.hard and not runs.random:
            details += _check_variants(call, runs, backward, settings)
    except CannotReplay as found:
        reason = str(found)
    except DeviceRaised as found:
        details.append(_raised(found, ""))
    forward, back = (_worst([one for one in details if one.direction == way]) for way in ("forward", "backward"))
    wrong = dict.fromkeys(one.message for one in details if one.result == "fail")
    left_out = dict.fromkeys(one.message for one in details if one.result == "skip" and not one.variant)
    return CallCheck(
        call=call.name,
        op=call.op,
        step=call.step,
        rank=call.rank,
        line=call.index,
        module=call.module,
        forward=forward,
        backward=back,
        message="; ".join(wrong or left_out) or reason,
        details=details,
        elapsed_s=time.perf_counter() - started,
        data=data,
    )


def _check(runs: Runs, backward: StoredCall | None, settings: CheckSettings, variant: str) -> list[Checked]:
    details = runs.check_forward()
    if settings.backward:
        try:
            details += runs.check_backward(backward)
        except DeviceRaised as found:
            details.append(_raised(found, variant))
    return details


def _check_variants(
    call: StoredCall, ordinary: Runs, backward: StoredCall | None, settings: CheckSettings
) -> Iterator[Checked]:
    """The rows of every variant of the inputs; one row with the reason for each that means nothing to the op."""
    for variant in VARIANTS:
        try:
            runs = make_variant(call, ordinary, settings.conditions(variant))
            yield from _check(runs, backward, settings, variant)
        except (CannotReplay, Unsuitable) as reason:
            yield passed_over("forward", f"{variant}: {reason}", variant)
        except DeviceRaised as found:
            yield _raised(found, variant)


def _raised(found: DeviceRaised, variant: str) -> Checked:
    message = f"{variant}: {found}" if variant else str(found)
    return Checked(
        direction=found.direction, slot="", device_dtype="", reference_dtype="", shape=[], result="fail",
        judged_by="raised", measured=1.0, allowed=0.0, message=message, variant=variant,
    )  # fmt: skip


def _worst(details: list[Checked]) -> Passed:
    results = {one.result for one in details}
    return "fail" if "fail" in results else "pass" if "pass" in results else "skip"

"""Which faulty kernels does precheck flag, and which healthy ones? For bench.precheck.

The second step of each workload of the simulated device's catalog is captured without faults. Then each fault is planted and every
call is run alone. A call is faulty when the device's bits differ from those it gives without the fault; what the
check then says is compared with that. Selectors of a fault that say where in a program it strikes (`nth`, `since`,
`module`, `probability`) mean nothing to a call that is run alone: they are left out, so that the kernel is wrong whenever
it runs; only where an op runs several times inside one call do `nth` and `since` count, from the beginning of the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

import tensorprobe
from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.evidence import measure, on_host
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.runs import DeviceRaised, prepare
from tensorprobe.sim.faults import Fault
from tensorprobe.sim.known_faults import CatalogFault

DEVICE = "npu"
STEPS = 2
"""Momentum is first used in the second."""
MODELS = ("gpt", "gpt-fused", "gpt-bf16", "cnn", "router")
INSIDE = ("lstm-cell-truncated", "attention-fused-overflow", "attention-fused-gradient", "linear-input-gradient")
"""Faults whose op runs several times in one call."""
NOISE = 4.0
"""A change below so many roundings of the result, relative to its size, is no more than another order of summation makes."""


@dataclass
class Outcome:
    """What one standard said of the calls that a fault changes."""

    fault: str
    standard: str
    data: str
    changed: int = 0
    flagged: int = 0
    below_noise: int = 0
    missed: list[str] = field(default_factory=list)
    """What was changed by more than noise and not flagged."""


def no_kernel_fault(entry: CatalogFault) -> str:
    """Why a fault of the catalog is not a property of one call alone; empty when it is."""
    if entry.model == "parallel":
        return "a collective: it needs the other ranks"
    if entry.fault.kind == "stale":
        return "state: the result is that of the call before, and a call that is run alone has none before it"
    return ""


def placeless(entry: CatalogFault) -> Fault:
    """The fault without what says where in a program it strikes."""
    changes: dict[str, Any] = {"module": None, "probability": 1.0}
    if entry.name not in INSIDE:
        changes |= {"nth": None, "since": 0}
    return msgspec.structs.replace(entry.fault, **changes)


def capture_models(work: Path) -> dict[str, list[StoredCall]]:
    """The forward calls of the last step of every workload."""
    found = {}
    for name in MODELS:
        folder = work / f"faults-{name}"
        training = workload(name, DEVICE)
        with tensorprobe.capture(folder, model=training.model, level="api", mode="tensor") as probe:
            for _ in range(STEPS):
                training.step()
                probe.step()
        run = tensorprobe.open_run(folder)
        found[name] = [call for call in run.calls(step=STEPS - 1) if call.direction == "forward"]
    return found


Results = dict[tuple[str, str], torch.Tensor] | str


def results_of(call: StoredCall, settings: CheckSettings) -> Results:
    """What the device gives, forward and backward, or what it raised."""
    try:
        runs, _ = prepare(call, settings.conditions())
        found = {("forward", name): on_host(output) for name, output in runs.device.outputs.items()}
        runs.check_backward(None)
        found |= {("backward", name): on_host(each) for name, each in runs.gradients.items()}
    except (CannotReplay, DeviceRaised) as reason:
        return str(reason)
    return found


def changed_by(right: Results, wrong: Results) -> dict[str, float]:
    """The directions in which results differ → by how many roundings of the result; infinite where one raises."""
    if isinstance(right, str):
        return {}
    if isinstance(wrong, str):
        return {"backward" if "its backward raised" in wrong else "forward": math.inf}
    changes: dict[str, float] = {}
    for (direction, name), value in right.items():
        other = wrong[direction, name]
        figures = measure([(value, other)])[0]
        if figures["different"] or figures["nonfinite_different"]:
            size = math.inf
            if value.is_floating_point() and not figures["nonfinite_different"]:
                size = figures["relative_l2"] / torch.finfo(value.dtype).eps
            changes[direction] = max(changes.get(direction, 0.0), size)
    return changes


def plant(
    entries: list[CatalogFault], calls: dict[str, list[StoredCall]], standards: tuple[str, ...], data: str
) -> Iterator[list[Outcome]]:
    """For each fault what each standard says of the calls that it changes."""
    bare = CheckSettings(device=DEVICE, data=data)  # type: ignore[arg-type]
    right = {model: [results_of(call, bare) for call in each] for model, each in calls.items()}
    for entry in entries:
        outcomes = {standard: Outcome(entry.name, standard, data) for standard in standards}
        for call, usual in zip(calls[entry.model], right[entry.model], strict=True):
            with sim.installed([placeless(entry)]) as handles:
                changes = changed_by(usual, results_of(call, bare))
                if not handles[0].fired or not changes:
                    continue
            for standard, outcome in outcomes.items():
                with sim.installed([placeless(entry)]):
                    settings = CheckSettings(device=DEVICE, data=data, standard=standard)  # type: ignore[arg-type]
                    check = check_call(call, None, settings)
                _count(outcome, call, changes, {"forward": check.forward, "backward": check.backward})
        yield list(outcomes.values())


def _count(outcome: Outcome, call: StoredCall, changes: dict[str, float], said: dict[str, str]) -> None:
    for direction, size in changes.items():
        outcome.changed += 1
        if said[direction] == "fail":
            outcome.flagged += 1
        elif size <= NOISE:
            outcome.below_noise += 1
        else:
            outcome.missed.append(f"{call.op}.{call.number}.{direction}: changed by {size:.3g} roundings")


def healthy(calls: dict[str, list[StoredCall]], standard: str, data: str) -> dict[str, Any]:
    """Calls on the device without faults, and on one that adds up in another order: how many are flagged."""
    flagged: list[str] = []
    checked = 0
    sums = ("mm", "bmm", "addmm", "sum", "mean", "convolution_overrideable")
    other = [Fault(op=f"aten::{op}", kind="accumulate", params={"precision": "float32", "block": 16}) for op in sums]
    for faults, label in (([], ""), (other, " in another order of summation")):
        with sim.installed(faults):
            for model, each in calls.items():
                for call in each:
                    settings = CheckSettings(device=DEVICE, data=data, standard=standard)  # type: ignore[arg-type]
                    check = check_call(call, None, settings)
                    for direction in ("forward", "backward"):
                        said = getattr(check, direction)
                        checked += said != "skip"
                        if said == "fail":
                            flagged.append(f"{model} {call.op}.{call.number}.{direction}{label}: {check.message}")
    return {"standard": standard, "data": data, "checked": checked, "flagged": len(flagged), "which": flagged}


def summary(outcomes: list[Outcome], standard: str, data: str) -> dict[str, Any]:
    """Over all faults: how many calls they change, how many are flagged, which faults are found."""
    mine = [one for one in outcomes if one.standard == standard and one.data == data]
    changed, below = sum(one.changed for one in mine), sum(one.below_noise for one in mine)
    flagged = sum(one.flagged for one in mine)
    return {
        "standard": standard,
        "data": data,
        "faults": len(mine),
        "faults_found": sum(one.flagged > 0 for one in mine),
        "faults_not_shown": [one.fault for one in mine if not one.changed],
        "changed": changed,
        "flagged": flagged,
        "below_noise": below,
        "missed": changed - flagged - below,
        "share_above_noise": flagged / max(changed - below, 1),
    }


def as_table(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [asdict(one) for one in outcomes]

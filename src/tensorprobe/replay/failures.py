"""Writes a failing call as a script that runs it alone, with the inputs and limits of the failure."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tensorprobe.judge.standards import STANDARDS, Evidence, limits
from tensorprobe.model.call import device_of
from tensorprobe.model.precheck import CallCheck
from tensorprobe.model.reason import NotReplayed
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.evidence import on_host
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.hard import make_variant
from tensorprobe.replay.randomness import is_dropout, sampling
from tensorprobe.replay.runs import Conditions, DeviceRaised, Runs, prepare
from tensorprobe.replay.script import Results, Sampling, Script, make_script, place_line


def failure_script(
    call: StoredCall,
    backward: StoredCall | None,
    conditions: Conditions,
    check: CallCheck,
    imports: tuple[str, ...] = (),
) -> Script:
    """Return the script of a failing call. Raises CannotReplay if the call cannot be run any more.

    If a call fails with several variants of its inputs, the script has the first. It runs the backward if the check did.
    """
    failing = next((one for one in check.details if one.result == "fail"), None)
    variant = "" if failing is None else failing.variant
    runs = _run_again(call, backward, conditions._replace(variant=variant, thorough=True), check)
    largest = max((output.numel() for output in runs.device.outputs.values()), default=0)
    results = Results(
        limits=_limits(call, runs, conditions.standard),
        held=dict(_results(runs)),
        changed=runs.device.changed,
        sampling=Sampling(*sampling(call.model, largest)) if runs.random else None,
    )
    device = device_of(call.model) if conditions.recorded else conditions.device
    about = [f"{call.name} fails on {device}: {check.message}", place_line(call.step, call.rank)]
    about += [f"Module: {call.module}"] if call.module else []
    about += [f"Called at {check.source}"] if check.source is not None else []
    about.append(f"Inputs: {check.data}{f', {variant}' if variant else ''}. Standard: {conditions.standard}.")
    return make_script(
        runs.call.model,
        runs.inputs,
        runs.given,
        results,
        device=device,
        precision=runs.precision,
        about=about,
        imports=imports,
    )


def _run_again(call: StoredCall, backward: StoredCall | None, conditions: Conditions, check: CallCheck) -> Runs:
    """Return the replays with the failing inputs, on the CPU if the device raises."""
    for device in (conditions.device, "cpu"):
        at = conditions._replace(device=device)
        try:
            runs, _ = prepare(call, at._replace(variant=""))
            if at.variant:
                runs = make_variant(call, runs, at)
            runs.check_forward()
            if any((one.direction, one.variant) == ("backward", at.variant) for one in check.details):
                runs.check_backward(backward)
        except DeviceRaised:
            continue
        return runs
    raise CannotReplay(NotReplayed.RAISES)


def _results(runs: Runs) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in runs.device.outputs.items():
        yield f"device.{name}", on_host(tensor)
    for name, tensor in runs.gradients.items():
        yield f"device.gradient.{name}", on_host(tensor)


def _limits(call: StoredCall, runs: Runs, standard: str) -> dict[str, dict[str, float]]:
    if runs.random:
        return {name: {} for name in runs.device.outputs if name == "output.0" or not is_dropout(call.model)}
    return {
        name if direction == "forward" else f"d input{name[6:]}" if name.startswith("output") else f"d {name}": each
        for (direction, name), evidence in runs.evidence.items()
        if (each := _allowed(standard, evidence))
    }


def _allowed(standard: str, evidence: Evidence) -> dict[str, float]:
    """Return every limit of the standard, in the figures of the script. Trends count only if they are significant."""
    sure = {**evidence.device, "slope_z": float("inf"), "bias_z": float("inf")}
    return {each.judged_by: each.allowed for each in limits(STANDARDS[standard], evidence._replace(device=sure))}

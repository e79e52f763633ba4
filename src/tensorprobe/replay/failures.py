"""A failing call, saved: its tensors as they were used, and a script that runs it again without any of our code.

In: the call, the settings it failed under and its check. Out: two files, `<call>.safetensors` and `<call>.py`. No pickle is
written. A call that fails with several variants of its inputs is saved with the first of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorprobe.errors import SettingsError
from tensorprobe.judge.standards import STANDARDS, Evidence, limits
from tensorprobe.model.precheck import CallCheck
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.arguments import PRECISIONS
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.hard import make_variant
from tensorprobe.replay.indices import choice_dimension, vector_dimension
from tensorprobe.replay.layout import block
from tensorprobe.replay.measuring import on_host
from tensorprobe.replay.once import autocast_dtype, stays_on_host
from tensorprobe.replay.randomness import is_dropout, sampling
from tensorprobe.replay.runs import Conditions, DeviceRaised, Runs, prepare
from tensorprobe.replay.script import Sampling, ScriptParts, render
from tensorprobe.replay.source import call_source

_LONGEST_NAME = 180


def save_failure(
    call: StoredCall, backward: StoredCall | None, conditions: Conditions, check: CallCheck, folder: Path
) -> Path:
    """Write both files into `folder`; return the path of the script. Without `backward` in the check none is run.

    SettingsError where safetensors is not installed, CannotReplay where the call cannot be run any more.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise SettingsError(
            "saving failing calls needs safetensors, which is not installed. Install it: pip install 'tensorprobe[safetensors]'"
        ) from None
    failing = next((one for one in check.details if one.result == "fail"), None)
    runs = _run_again(
        call, backward, conditions._replace(variant=failing.variant if failing is not None else ""), check
    )
    saved = _Saved(call, runs, conditions, check)
    script = folder / f"{_file_name(call, folder)}.py"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(script.with_suffix(".safetensors"), save(dict(saved.tensors())))
    write_whole(script, saved.script().encode())
    return script


def _run_again(call: StoredCall, backward: StoredCall | None, conditions: Conditions, check: CallCheck) -> Runs:
    """The replays with the inputs that failed; those of the CPU where the device raises."""
    for device in (conditions.device, "cpu"):
        at = conditions._replace(device=device)
        try:
            runs, _ = prepare(call, at._replace(variant=""))
            if at.variant:
                runs = make_variant(call, runs, at)
            runs.check_forward()
            if any(one.direction == "backward" for one in check.details):
                runs.check_backward(backward)
        except DeviceRaised:
            continue
        return runs
    raise CannotReplay("it raises also on the CPU")


@dataclass(frozen=True)
class _Saved:
    """What is written of a call."""

    call: StoredCall
    runs: Runs
    conditions: Conditions
    check: CallCheck

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Inputs, gradients of outputs, and what the device made of them, as safetensors can hold them."""
        for name, tensor in self.runs.inputs.items():
            yield name, storable(tensor)
        for name, tensor in self.runs.given.items():
            yield f"gradient.{name}", storable(tensor)
        for name, tensor in self.runs.device.outputs.items():
            yield f"device.{name}", storable(on_host(tensor))
        for name, tensor in self.runs.gradients.items():
            yield f"device.gradient.{name}", storable(on_host(tensor))

    def script(self) -> str:
        model, runs = self.call.model, self.runs
        held = {**runs.inputs, **{f"gradient.{name}": tensor for name, tensor in runs.given.items()}}
        autocast = autocast_dtype(model)
        outputs = runs.device.outputs
        return render(
            ScriptParts(
                about=self._about(),
                device=self.conditions.device,
                source=call_source(model),
                imports=["torch_npu"] if model.op.startswith("NPU.") else [],
                wide={str(one): str(other) for one, other in PRECISIONS[runs.precision].items()},
                layouts={
                    name: (tuple(tensor.shape), tensor.stride())
                    for name, tensor in held.items()
                    if not tensor.is_contiguous() or tensor.is_complex()
                },
                complex_slots=[name for name, tensor in held.items() if tensor.is_complex()],
                grads=[slot.name for slot in model.slots if slot.grad and slot.name in runs.inputs],
                on_host=[name for name in runs.inputs if stays_on_host(model, name)],
                changed=runs.device.changed,
                mutates=runs.device.mutates,
                autocast=None if autocast is None else str(autocast),
                choices={
                    name: found[0]
                    for name, output in outputs.items()
                    if output.dtype is torch.int64 and (found := choice_dimension(model, name)) is not None
                },
                vectors={name: dim for name in outputs if (dim := vector_dimension(model.op, name)) is not None},
                limits=self._limits(),
                sampling=Sampling(*sampling(model, _largest(runs))) if runs.random else None,
            )
        )

    def _about(self) -> list[str]:
        call, check = self.call, self.check
        lines = [f"{call.name} fails on {self.conditions.device}: {check.message}"]
        lines.append(_place(call))
        if call.module:
            lines.append(f"Module: {call.module}")
        if check.source is not None:
            lines.append(f"Called at {check.source}")
        variant = next((one.variant for one in check.details if one.result == "fail" and one.variant), "")
        lines.append(f"Inputs: {check.data}{f', {variant}' if variant else ''}. Standard: {self.conditions.standard}.")
        return lines

    def _limits(self) -> dict[str, dict[str, float]]:
        if self.runs.random:
            outputs = self.runs.device.outputs
            return {name: {} for name in outputs if name == "output.0" or not is_dropout(self.call.model)}
        return {
            name if direction == "forward" else f"d input{name[6:]}" if name.startswith("output") else f"d {name}": each
            for (direction, name), evidence in self.runs.evidence.items()
            if (each := _allowed(self.conditions.standard, evidence))
        }


def _allowed(standard: str, evidence: Evidence) -> dict[str, float]:
    """Every limit of the standard, in the figures of the script. Trends count there, too, only where they are sure."""
    sure = {**evidence.device, "slope_z": float("inf"), "bias_z": float("inf")}
    found = {}
    for opinion in limits(STANDARDS[standard], evidence._replace(device=sure)):
        name = opinion.judged_by
        if name.startswith("within"):
            counts = standard == "noise-aware"
            name = f"{'' if counts else 'share_'}over_{name.removeprefix('within_')}"
        found[name] = opinion.allowed
    return found


def _largest(runs: Runs) -> int:
    return max((output.numel() for output in runs.device.outputs.values()), default=0)


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or where it is not contiguous the memory it spans; complex numbers as their parts."""
    flat = tensor.detach() if tensor.is_contiguous() and not tensor.is_complex() else block(tensor)
    return torch.view_as_real(flat).flatten().clone() if flat.is_complex() else flat.clone()


def _place(call: StoredCall) -> str:
    return f"Step {call.step}, rank {call.rank}."


def _file_name(call: StoredCall, folder: Path) -> str:
    """The name of the call, safe for every file system; with step and rank where another step has taken it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", call.name).lstrip(".-")[:_LONGEST_NAME] or "call"
    taken = folder / f"{name}.py"
    if taken.exists() and _place(call) not in taken.read_text(encoding="utf-8", errors="replace"):
        return f"{name}.step{call.step}.rank{call.rank}"
    return name


def write_whole(path: Path, content: bytes) -> None:
    """All of it or nothing."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)

"""A birth on disk: its tensors, and a script that runs it alone without any of our code.

Two files, `<call>.safetensors` and `<call>.py`; no pickle. The script exits with 1 while the device differs from the CPU in what is
not finite, and with 0 when it does not: a normal overflow passes.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tensorprobe.replay.arguments import PRECISIONS
from tensorprobe.replay.failures import storable, write_whole
from tensorprobe.replay.functions import find_function
from tensorprobe.replay.once import autocast_dtype, changes, stays_on_host
from tensorprobe.replay.script import ScriptParts, render
from tensorprobe.replay.source import call_source
from tensorprobe.watches.overflow.born import BornCall

_LONGEST_NAME = 180


def save_birth(born: BornCall, folder: Path) -> Path:
    """Write both files; the path of the script. CannotReplay where the call cannot be written down."""
    from safetensors.torch import save

    call, inputs, gradients = born.replayed, born.inputs(), born.gradients() or {}
    held = {**inputs, **{f"gradient.{slot}": tensor for slot, tensor in gradients.items()}}
    device = next((slot.device for slot in born.call.slots), "cpu")
    autocast = autocast_dtype(born.call if born.forward is None else call)
    mutates, _ = changes(call, find_function(call.op))
    script = render(
        ScriptParts(
            about=_about(born),
            device=device,
            source=call_source(call),
            imports=["torch_npu"] if call.op.startswith("NPU.") else [],
            wide={str(one): str(other) for one, other in PRECISIONS["double"].items()},
            layouts={
                slot: (tuple(tensor.shape), tensor.stride())
                for slot, tensor in held.items()
                if not tensor.is_contiguous() or tensor.is_complex()
            },
            complex_slots=[slot for slot, tensor in held.items() if tensor.is_complex()],
            grads=[slot.name for slot in call.slots if slot.grad and slot.name in inputs],
            on_host=[slot for slot in inputs if stays_on_host(call, slot)],
            mutates=mutates,
            autocast=None if autocast is None else str(autocast),
            limits={_result_name(born, slot): {"nonfinite_different": 0.0} for slot in _floating(born.found())},
        )
    )
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"step{born.birth.step}.{born.birth.call}")[:_LONGEST_NAME]
    path = folder / f"{name}.py"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path.with_suffix(".safetensors"), save({slot: storable(tensor) for slot, tensor in held.items()}))
    write_whole(path, script.encode())
    return path


def _about(born: BornCall) -> list[str]:
    birth = born.birth
    lines = [f"{birth.call}: {birth.kind} was born here. {birth.verdict}: {birth.reason}"]
    lines.append(f"Step {birth.step}, rank {birth.rank}.")
    if birth.module:
        lines.append(f"Module: {birth.module}")
    if birth.frames:
        lines.append(f"Called at {birth.frames[0]}")
    return lines


def _result_name(born: BornCall, slot: str) -> str:
    """As the script names results: `output.0`, or `d input.0` for a gradient."""
    return slot if born.forward is None else f"d input{slot[6:]}"


def _floating(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [slot for slot, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()]

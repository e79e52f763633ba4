"""A birth as a script that runs it alone. It exits with 1 while the device differs from the CPU in what is not finite."""

from __future__ import annotations

from pathlib import Path

from tensorprobe.replay.script import Results, make_script, place_line
from tensorprobe.watches.overflow.born import BornCall


def save_birth(born: BornCall, folder: Path) -> Path:
    """Write the script and its tensors; return its path. CannotReplay where the call cannot be written down."""
    birth = born.birth
    floating = [slot for slot, tensor in born.found().items() if tensor.is_floating_point() or tensor.is_complex()]
    about = [f"{birth.call}: first {birth.kind}. {birth.verdict}: {birth.reason}", place_line(birth.step, birth.rank)]
    about += [f"Module: {birth.module}"] if birth.module else []
    about += [f"Called at {birth.frames[0]}"] if birth.frames else []
    names = [slot if born.forward is None else f"d input{slot[6:]}" for slot in floating]
    script = make_script(
        born.replayed,
        born.inputs(),
        born.gradients() or {},
        Results(limits={name: {"nonfinite_different": 0.0} for name in names}),
        device=next((slot.device for slot in born.call.slots), "cpu"),
        about=about,
    )
    return script.write(folder, f"step{birth.step}.{birth.call}")

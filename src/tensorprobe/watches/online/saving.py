"""A call that failed, on disk: its inputs, what the device and the reference made of them, and a script that runs it again."""

from __future__ import annotations

from pathlib import Path

from tensorprobe.arguments import Tensors, flatten_arguments
from tensorprobe.model import Call
from tensorprobe.replay.script import LIMIT_NAMES, Results, make_script
from tensorprobe.watches.online.lifting import lower
from tensorprobe.watches.online.verdict import Case, Judged


def save(case: Case, rows: list[Judged], folder: Path, title: str) -> None:
    """Write `replay.py` and `replay.safetensors` into the folder."""
    own = lower(case.templates, case.lifted)
    inputs: Tensors = []
    args, kwargs = flatten_arguments(tuple(own.args), own.kwargs, inputs)
    call = Call(name=f"{case.plan.name}.0.forward", args=args, kwargs=kwargs)
    held = {f"device.{row.slot}": row.result for row in rows}
    held |= {f"reference.{row.slot}": row.wide for row in rows if row.wide is not None}
    changed = {
        row.slot: f"{'input.' if isinstance(at, int) else 'input.kwargs.'}{at}{row.slot.removeprefix(f'output.{at}')}"
        for at in case.plan.written
        for row in rows
        if row.slot == f"output.{at}" or row.slot.startswith(f"output.{at}.")
    }
    limits = {row.slot: _limit(row) for row in rows}
    script = make_script(call, dict(inputs), {}, Results(limits, held, changed), device=case.device, about=[title])
    script.write(folder, "replay")


def _limit(row: Judged) -> dict[str, float]:
    """Return the limit of a slot in the figures of the script."""
    name, count = row.opinion.judged_by, max(row.result.numel(), 1)
    if name.startswith("within"):
        return {f"over_{name.removeprefix('within_')}": min(row.opinion.allowed, count)}
    return {name: row.opinion.allowed} if name in LIMIT_NAMES else {}

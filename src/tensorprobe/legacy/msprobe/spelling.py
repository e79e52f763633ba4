"""How msprobe spells the tensors of a call, whatever layout the run has: `Functional.conv2d.0.forward.input.0`.

A keyword has no word of its own before it (`….input.dim`), and the gradients of a module's parameters are an entry by
themselves (`Module.conv.Conv2d.parameters_grad.0.weight`).
"""

from __future__ import annotations

from tensorprobe.legacy.compared.lines import Spell, Spelled, Statistics
from tensorprobe.model import Call, Summary
from tensorprobe.record.run import Segment

GRADIENTS = ".parameters_grad"


def spell_for(_: Segment) -> Spell:
    """One rule for all layouts."""
    return _spell


def _spell(call: Call) -> list[Spelled]:
    gradients = f"{call.op.removesuffix(GRADIENTS)}{GRADIENTS}.{call.number}" if call.direction == "backward" else ""
    return [
        (
            _line_name(call.name, slot.name, gradients),
            f"torch.{slot.dtype}",
            str(list(slot.shape)),
            None if slot.summary is None else _statistics(slot.summary),
        )
        for slot in call.slots
    ]


def _line_name(call: str, slot: str, gradients: str) -> str:
    side, _, rest = slot.partition(".")
    if side == "parameters" and gradients:
        return f"{gradients}.{rest}"
    return f"{call}.{side}.{rest.removeprefix('kwargs.')}"


def _statistics(held: Summary) -> Statistics:
    """max, min, mean, norm; then whether there is a NaN in the tensor, which tells a NaN from what is not known."""
    return float(held.max), float(held.min), float(held.mean), float(held.norm), held.nan

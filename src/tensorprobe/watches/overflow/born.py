"""A call that gave birth, kept: the call as a record would have it, and copies of its tensors, as many as fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorprobe.model import Call, Slot
from tensorprobe.model.overflow import Birth
from tensorprobe.watches.overflow.facts import Facts

NamedTensors = Sequence[tuple[str, torch.Tensor]]


@dataclass
class BornCall:
    """What a birth is replayed from. For a backward birth `forward` is the call whose gradients it computes."""

    birth: Birth
    call: Call
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """On the CPU, by slot; inputs as they were before the call."""
    forward: Call | None = None
    forward_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    lacking: str = ""
    """Why it cannot be replayed, if something is absent."""

    @property
    def replayed(self) -> Call:
        """The call that is run alone."""
        return self.forward or self.call

    def inputs(self) -> dict[str, torch.Tensor]:
        """What it is run with."""
        return self.forward_inputs if self.forward else _side(self.tensors, "input")

    def found(self) -> dict[str, torch.Tensor]:
        """What the device gave."""
        return _side(self.tensors, "output")

    def gradients(self) -> dict[str, torch.Tensor] | None:
        """The gradients of the outputs of a backward birth, by the outputs' slots."""
        if self.forward is None:
            return None
        return {f"output{slot[5:]}": tensor for slot, tensor in _side(self.tensors, "input").items()}


def describe_call(
    name: str,
    module: str,
    inputs: NamedTensors,
    outputs: NamedTensors,
    args: Any = None,
    kwargs: Any = None,
) -> Call:
    """The call as one line of a record has it, without values."""
    slots = tuple(_slot(slot, tensor) for slot, tensor in (*inputs, *outputs))
    return Call(name=name, module=module, args=args, kwargs=kwargs, slots=slots)


def describe_facts(name: str, module: str, facts: Iterable[Facts]) -> Call:
    """The same of a call whose tensors nobody has any more."""
    slots = tuple(Slot(name=each.slot, dtype=each.dtype, shape=each.shape) for each in facts)
    return Call(name=name, module=module, slots=slots)


def _side(tensors: Mapping[str, torch.Tensor], *sides: str) -> dict[str, torch.Tensor]:
    return {slot: tensor for slot, tensor in tensors.items() if slot.startswith(sides)}


def _slot(name: str, tensor: torch.Tensor) -> Slot:
    return Slot(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(int(size) for size in tensor.shape),
        device=str(tensor.device),
        stride=None if tensor.is_contiguous() else tuple(tensor.stride()),
        grad=tensor.requires_grad,
    )

"""A call that returned the first NaN or inf: the call as a record would have it, and copies of its tensors, as many as fit.

Copies are taken while the tensors are still there. What is absent, and why, stands in `lacking`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorprobe.model import Call, Slot
from tensorprobe.model.overflow import Birth
from tensorprobe.replay.layout import copied
from tensorprobe.taps.looking import LookedCall
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.facts import Facts
from tensorprobe.watches.overflow.looker import Before, Remembered
from tensorprobe.watches.overflow.tensors import readable

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


class Keeper:
    """Keeps tensors on the CPU, `room` bytes at most at one time."""

    def __init__(self, room: int) -> None:
        self._room = room

    def let_go(self, kept: BornCall) -> None:
        """Nobody needs the copies any more."""
        self._room += sum(tensor.nbytes for tensor in (*kept.tensors.values(), *kept.forward_inputs.values()))
        kept.tensors, kept.forward_inputs = {}, {}

    def forward(
        self, birth: Birth, call: Call, inputs: NamedTensors, outputs: NamedTensors, before: dict[int, Before]
    ) -> BornCall:
        """Of a forward call; of what it overwrote, the copies that were made before it."""
        kept = BornCall(birth, call)
        still: list[tuple[str, torch.Tensor]] = []
        for slot, tensor in inputs:
            was = before.get(id(tensor))
            if was is None:
                still.append((slot, tensor))
            elif was.copy is not None:
                still.append((slot, was.copy))
            else:
                kept.lacking = f"it overwrote {slot}"
        kept.tensors = self._copy([*still, *outputs], kept)
        return kept

    def backward(
        self,
        birth: Birth,
        call: LookedCall,
        remembered: Remembered | None,
        inputs: NamedTensors,
        outputs: NamedTensors,
    ) -> BornCall:
        """Of a backward call, with the inputs of its forward as far as they are still there."""
        kept = BornCall(birth, describe_call(call.backward_name, call.module, inputs, outputs))
        kept.tensors = self._copy([*inputs, *outputs], kept)
        if remembered is None:
            kept.lacking = "its forward was not seen"
            return kept
        alive: list[tuple[str, torch.Tensor]] = []
        for slot, reference, version in zip(remembered.slots, remembered.tensors, remembered.versions, strict=True):
            tensor = (remembered.copies or {}).get(slot)
            if tensor is None:
                tensor = reference()
                if tensor is not None and not tensor.is_inference() and tensor._version != version:
                    kept.lacking = kept.lacking or f"{slot} of its forward has been changed since"
                    continue
            if tensor is None:
                kept.lacking = kept.lacking or f"{slot} of its forward is gone"
                continue
            alive.append((slot, tensor))
        kept.forward_inputs = self._copy(alive, kept)
        kept.lacking = kept.lacking or _fit_gradients(kept, remembered)
        # A gradient has the dtype and the shape of its output: autocast shows nowhere else.
        outputs = [
            (f"output{slot[5:]}", gradient) for slot, gradient in kept.tensors.items() if slot.startswith("input")
        ]
        kept.forward = describe_call(call.name, call.module, alive, outputs, remembered.args, remembered.kwargs)
        return kept

    def _copy(self, tensors: NamedTensors, kept: BornCall) -> dict[str, torch.Tensor]:
        copies: dict[str, torch.Tensor] = {}
        with quiet(), torch.inference_mode(False):
            for slot, tensor in tensors:
                if tensor.nbytes > self._room:
                    kept.lacking = (
                        kept.lacking or f"{slot} has {tensor.nbytes:,} bytes, more than is left of keep_bytes"
                    )
                    continue
                plain = readable(tensor)
                source = tensor.detach() if plain is None else plain
                if source.layout is not torch.strided or source.is_meta or source.is_nested:
                    kept.lacking = kept.lacking or f"{slot} has no plain memory"
                    continue
                copies[slot] = copied(source, source.dtype, "cpu")
                self._room -= tensor.nbytes
        return copies


def _fit_gradients(kept: BornCall, remembered: Remembered) -> str:
    """Give the gradients the shapes of the outputs that they are the gradients of; why not, where they are none."""
    for slot, tensor in list(kept.tensors.items()):
        if slot.startswith("input."):
            place = int(slot[6:])
            shape = remembered.shapes[place] if place < len(remembered.shapes) else ()
            if tensor.numel() != math.prod(shape):
                return "it happened in a part of the call's backward that has others before it"
            kept.tensors[slot] = tensor.reshape(shape)
    return ""

"""What is kept of a call that made a NaN or inf: its description for the report, and copies of its tensors for the replay.

`Describer` writes the finding: ranges, indices, the user's line, the producers of the inputs, the last calls. `Keeper` copies the
tensors while they are still there, as many as fit; `KeptCall.lacking` says what is missing and why.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from tensorprobe import torch_names
from tensorprobe.model import Call, Slot
from tensorprobe.model.call import Frame
from tensorprobe.model.overflow import Arrival, Arrived, FirstNonfinite, Kind
from tensorprobe.replay.layout import copied
from tensorprobe.taps.looking import LookedCall
from tensorprobe.taps.module_names import named_tensors
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.looker import (
    Before,
    OverflowLooker,
    Remembered,
    Row,
    bare,
    facts_of,
    key_of,
    places_of,
    readable,
)
from tensorprobe.watches.overflow.rules import Facts, Seen, forward_extents

NamedTensors = Sequence[tuple[str, torch.Tensor]]


@dataclass
class KeptCall:
    """A finding with the call and tensors to replay it. For a backward call, `forward` is the call it belongs to."""

    first: FirstNonfinite
    call: Call
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By slot, on the CPU. Inputs are as they were before the call."""
    forward: Call | None = None
    forward_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    lacking: str = ""
    """Why it cannot be replayed; empty if it can."""

    @property
    def replayed(self) -> Call:
        """The call to replay."""
        return self.forward or self.call

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs for the replay."""
        return self.forward_inputs if self.forward else _side(self.tensors, "input")

    def found(self) -> dict[str, torch.Tensor]:
        """Return the outputs of the device."""
        return _side(self.tensors, "output")

    def gradients(self) -> dict[str, torch.Tensor] | None:
        """Return the incoming gradients of a backward call, by the slot of the forward's output; None for a forward."""
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
    """Return the call as a run would record it, without values."""
    slots = tuple(_slot(slot, tensor) for slot, tensor in (*inputs, *outputs))
    return Call(name=name, module=module, args=args, kwargs=kwargs, slots=slots)


def describe_facts(name: str, module: str, facts: Iterable[Facts]) -> Call:
    """Return the call as a run would record it, when its tensors no longer exist."""
    slots = tuple(Slot(name=each.slot, dtype=each.dtype, shape=each.shape) for each in facts)
    return Call(name=name, module=module, slots=slots)


def _side(tensors: Mapping[str, torch.Tensor], *sides: str) -> dict[str, torch.Tensor]:
    return {slot: tensor for slot, tensor in tensors.items() if slot.startswith(sides)}


def _slot(name: str, tensor: torch.Tensor) -> Slot:
    grad, tensor = torch_names.requires_grad_of(tensor), bare(tensor)
    return Slot(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(int(size) for size in tensor.shape),
        device=str(tensor.device),
        stride=None if tensor.is_contiguous() else tuple(tensor.stride()),
        grad=grad,
    )


class Keeper:
    """Keeps copies of tensors on the CPU, at most `room` bytes at a time."""

    def __init__(self, room: int) -> None:
        self._room = room

    def let_go(self, kept: KeptCall) -> None:
        """Free the copies of a call."""
        self._room += sum(tensor.nbytes for tensor in (*kept.tensors.values(), *kept.forward_inputs.values()))
        kept.tensors, kept.forward_inputs = {}, {}

    def forward(
        self, first: FirstNonfinite, call: Call, inputs: NamedTensors, outputs: NamedTensors, before: dict[int, Before]
    ) -> KeptCall:
        """Keep a forward call. For inputs that it overwrote, use the copies made before the call."""
        kept = KeptCall(first, call)
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
        first: FirstNonfinite,
        call: LookedCall,
        remembered: Remembered | None,
        inputs: NamedTensors,
        outputs: NamedTensors,
    ) -> KeptCall:
        """Keep a backward call, with those inputs of its forward that still exist."""
        kept = KeptCall(first, describe_call(call.backward_name, call.module, inputs, outputs))
        kept.tensors = self._copy([*inputs, *outputs], kept)
        if remembered is None:
            kept.lacking = "its forward was not seen"
            return kept
        alive: list[tuple[str, torch.Tensor]] = []
        for slot, reference, version in zip(remembered.slots, remembered.tensors, remembered.versions, strict=True):
            tensor = (remembered.copies or {}).get(slot)
            if tensor is None:
                tensor = reference()
                tensor = (remembered.held or {}).get(slot) if tensor is None else tensor
                if tensor is not None and torch_names.version_of(tensor) not in (-1, version):
                    kept.lacking = kept.lacking or f"{slot} of its forward has been changed since"
                    continue
            if tensor is None:
                kept.lacking = kept.lacking or f"{slot} of its forward is gone"
                continue
            alive.append((slot, tensor))
        kept.forward_inputs = self._copy(alive, kept)
        facts = [each for slot, tensor in kept.forward_inputs.items() if (each := facts_of(slot, tensor)) is not None]
        kept.first = msgspec.structs.replace(first, forward=forward_extents(facts, first.outputs))
        kept.lacking = kept.lacking or _fit_gradients(kept, remembered)
        # A gradient has the dtype and shape of its output. Nothing else shows that autocast was on.
        outputs = [
            (f"output{slot[5:]}", gradient) for slot, gradient in kept.tensors.items() if slot.startswith("input")
        ]
        kept.forward = describe_call(call.name, call.module, alive, outputs, remembered.args, remembered.kwargs)
        return kept

    def _copy(self, tensors: NamedTensors, kept: KeptCall) -> dict[str, torch.Tensor]:
        copies: dict[str, torch.Tensor] = {}
        with quiet(), torch.inference_mode(False):
            for slot, given in tensors:
                tensor = bare(given)
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


def _fit_gradients(kept: KeptCall, remembered: Remembered) -> str:
    """Give the gradients the shapes of the outputs; return why that is impossible, or an empty string."""
    for slot, tensor in list(kept.tensors.items()):
        if slot.startswith("input."):
            place = int(slot[6:])
            shape = remembered.shapes[place] if place < len(remembered.shapes) else ()
            if tensor.numel() != math.prod(shape):
                return "it happened inside the call's backward, after other nodes of it"
            kept.tensors[slot] = tensor.reshape(shape)
    return ""


CHAIN = 8
Tensors = dict[str, torch.Tensor]
Frames = list[tuple[str, int, str]]


class At(NamedTuple):
    """Where in the training a call is."""

    step: int
    repeat: bool
    epoch: int


class Describer:
    """Describes the findings of one rank."""

    def __init__(self, looker: OverflowLooker, rank: int, model: Any, lines: Callable[[], list[str]]) -> None:
        self._looker, self._rank, self._model, self._lines = looker, rank, model, lines

    def describe_first(
        self, at: At, seen: Seen, kind: Kind, inputs: Tensors, outputs: Tensors, frames: Frames
    ) -> FirstNonfinite:
        """Describe a call that made a NaN or inf. It has no verdict yet."""
        chain, makers = self._chain(inputs)
        kept = []
        for facts in seen.outputs:
            if not facts.clean or kind in ("saturated", "flagged"):
                tensor = outputs.get(facts.slot) if kind != "flagged" else None
                places = (None, None) if tensor is None else places_of(tensor, greatest=kind == "saturated")
                kept.append(facts.as_output(*places))
        return FirstNonfinite(
            number=0,
            call=seen.name,
            op=seen.op,
            direction="backward" if seen.name.endswith("backward") else "forward",
            kind=kind,
            module=seen.module,
            step=at.step,
            rank=self._rank,
            index=self._looker.index,
            repeat=int(at.repeat),
            epoch=at.epoch,
            outputs=kept,
            inputs=[facts.extent(makers.get(facts.slot)) for facts in seen.inputs],
            frames=_frames(frames),
            chain=chain,
            before=self._lines()[:-1],
            spread=[],
            spread_count=0,
            verdict="unknown",
            reason="not replayed yet",
            script=None,
            note="",
        )

    def arrival(self, at: At, seen: Seen, facts: Facts, what: str, frames: Frames) -> Arrival:
        """Describe a NaN or inf that no watched call made, at the first call that used it."""
        return Arrival(
            call=seen.name,
            slot=facts.slot,
            what=str(what),
            module=seen.module,
            step=at.step,
            rank=self._rank,
            index=self._looker.index,
            epoch=at.epoch,
            dtype=facts.dtype,
            shape=list(facts.shape),
            nan=facts.moments.nan,
            inf=facts.moments.inf,
            frames=_frames(frames),
            spread=[],
            spread_count=0,
        )

    def what(self, facts: Facts, inputs: Tensors) -> str:
        """Return what the tensor is: a parameter, buffer or gradient of the model, else an input or a gradient."""
        tensor = inputs.get(facts.slot)
        for name, held in named_tensors(self._model):
            if held is tensor or key_of(held) == facts.key:
                return f"{Arrived.PARAMETER if isinstance(held, torch.nn.Parameter) else Arrived.BUFFER} {name}"
            if held.grad is not None and key_of(held.grad) == facts.key:
                return f"{Arrived.GRADIENT} of {name}"
        return Arrived.GRADIENT if torch_names.graph_task() != -1 else Arrived.INPUT

    def _chain(self, inputs: Tensors) -> tuple[list[str], dict[str, str]]:
        """Return the chain of producers of the first input, and the producer of each input."""
        rows = list(self._looker.rows)
        until = len(rows) - (1 if rows and torch_names.graph_task() == -1 else 0)
        makers: dict[str, int] = {}
        for slot, tensor in inputs.items():
            place = self._looker.producer(tensor, until=until)
            if place is not None:
                makers[slot] = place
        chain: list[str] = []
        at = next(iter(makers.values()), None)
        while at is not None and len(chain) < CHAIN:
            chain.append(_name(rows[at]))
            given = rows[at][3]
            found = (self._looker.producer(None, reference, at) for reference in given)
            at = next((place for place in found if place is not None), None)
        return chain, {slot: _name(rows[place]) for slot, place in makers.items()}


def _name(row: Row) -> str:
    return f"{row[0]}.{row[1]}.forward"


def _frames(frames: Frames) -> list[Frame]:
    return [Frame(file, line, name, linecache.getline(file, line).strip()) for file, line, name in frames]

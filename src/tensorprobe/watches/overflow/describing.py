"""A birth or an arrival with all that is told of it: ranges, places, the user's line, who made the inputs, the last calls."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensorprobe import torch_names
from tensorprobe.model.call import Frame
from tensorprobe.model.overflow import Arrival, Birth, Kind
from tensorprobe.watches.overflow.facts import Facts
from tensorprobe.watches.overflow.looker import OverflowLooker
from tensorprobe.watches.overflow.rules import Seen
from tensorprobe.watches.overflow.tensors import key_of, places_of

CHAIN = 8
Tensors = dict[str, torch.Tensor]
Frames = list[tuple[str, int, str]]


class At(NamedTuple):
    """Where a call is."""

    step: int
    repeat: bool
    epoch: int


class Describer:
    """Describes findings of one rank."""

    def __init__(self, looker: OverflowLooker, rank: int, model: Any, lines: Callable[[], list[str]]) -> None:
        self._looker, self._rank, self._model, self._lines = looker, rank, model, lines

    def birth(self, at: At, seen: Seen, kind: Kind, inputs: Tensors, outputs: Tensors, frames: Frames) -> Birth:
        """The call gave birth. The verdict is still open."""
        chain, makers = self._chain(inputs)
        born = []
        for facts in seen.outputs:
            if not facts.clean or kind in ("saturated", "flagged"):
                tensor = outputs.get(facts.slot) if kind != "flagged" else None
                places = (None, None) if tensor is None else places_of(tensor, greatest=kind == "saturated")
                born.append(facts.born(*places))
        return Birth(
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
            outputs=born,
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
        """The call was the first that had it, and nobody has made it."""
        return Arrival(
            call=seen.name,
            slot=facts.slot,
            what=what,
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
        """What it is that came in: a parameter, a buffer, a gradient of the model, or an input."""
        tensor = inputs.get(facts.slot)
        for module in self._models():
            for name, held in (*module.named_parameters(), *module.named_buffers()):
                if held is tensor or key_of(held) == facts.key:
                    return f"parameter {name}" if isinstance(held, torch.nn.Parameter) else f"buffer {name}"
                if held.grad is not None and key_of(held.grad) == facts.key:
                    return f"gradient of {name}"
        return "gradient" if torch_names.graph_task() != -1 else "input"

    def _models(self) -> list[torch.nn.Module]:
        model = self._model
        several = list(model.values()) if isinstance(model, dict) else model
        found = several if isinstance(several, (list, tuple)) else [several]
        return [each for each in found if isinstance(each, torch.nn.Module)]

    def _chain(self, inputs: Tensors) -> tuple[list[str], dict[str, str]]:
        """Who made the inputs, and who made an input of the first of those, and so on; and the maker of each input."""
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
            call, _, given = rows[at]
            chain.append(call.name)
            found = (self._looker.producer(None, reference, at) for reference in given)
            at = next((place for place in found if place is not None), None)
        return chain, {slot: rows[place][0].name for slot, place in makers.items()}


def _frames(frames: Frames) -> list[Frame]:
    return [Frame(file, line, name, linecache.getline(file, line).strip()) for file, line, name in frames]

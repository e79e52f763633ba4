"""A recorded call made again: its function found by its name, its arguments rebuilt from the record alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorprobe.record.stored import StoredCall

_HOMES: dict[str, tuple[Any, ...]] = {
    "Functional": (F, torch._C._nn),
    "Tensor": (torch.Tensor,),
    "Torch": (torch,),
    "VF": (torch._VF,),
}
_PLAIN_TYPES = {
    "torch.dtype": lambda value: getattr(torch, value),
    "torch.layout": lambda value: getattr(torch, value),
    "torch.memory_format": lambda value: getattr(torch, value),
    "torch.device": torch.device,
    "float": float,
    "int": int,
    "ellipsis": lambda _: ...,
}


class Replay:
    """One forward call run alone. `inputs` are its tensors by slot, leaves that require a gradient where the record says so."""

    def __init__(self, call: StoredCall) -> None:
        self.call = call
        self.inputs: dict[str, Tensor] = {}
        for slot in call.inputs:
            self.inputs[slot.name] = slot.tensor().clone().requires_grad_(slot.grad)
        self._working = dict(self.inputs)
        if self._changes_its_first_argument():
            # A leaf that requires a gradient cannot be changed in place; a copy of it can.
            self._working["input.0"] = self.inputs["input.0"] * 1
        args = [self._build(entry) for entry in call.args]
        kwargs = {key: self._build(entry) for key, entry in (call.kwargs or {}).items()}
        result = find_function(call.op)(*args, **kwargs)
        self.outputs = {"output.0": args[0]} if result is None else dict(_results(result))

    def gradients(self, grad_outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of the inputs, by slot, for gradients of the outputs, by slot."""
        wanted = {name: tensor for name, tensor in self.inputs.items() if tensor.requires_grad}
        pairs = [(self.outputs[name], gradient) for name, gradient in grad_outputs.items()]
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            list(wanted.values()),
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        return {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}

    def _changes_its_first_argument(self) -> bool:
        name = self.call.op.rpartition(".")[2]
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name == "__iadd__"
        return in_place or bool((self.call.kwargs or {}).get("inplace"))

    def _build(self, entry: Any) -> Any:
        if isinstance(entry, list):
            return [self._build(part) for part in entry]
        if not isinstance(entry, dict):
            return entry
        if "slot" in entry:
            return self._working[entry["slot"]]
        kind, value = entry["type"], entry["value"]
        if kind in _PLAIN_TYPES:
            return _PLAIN_TYPES[kind](value)
        if kind == "dict":
            return {key: self._build(part) for key, part in value.items()}
        parts = [self._build(part) for part in value]
        return {
            "tuple": tuple,
            "torch.Size": torch.Size,
            "slice": lambda p: slice(*p),
            "complex": lambda p: complex(*p),
        }[kind](parts)


def find_function(op: str) -> Any:
    home, _, name = op.partition(".")
    return next(getattr(place, name) for place in _HOMES[home] if hasattr(place, name))


def _results(result: Any, path: str = "output") -> list[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        return [(f"{path}.0" if path == "output" else path, result)]
    if isinstance(result, (tuple, list)):
        return [found for i, part in enumerate(result) for found in _results(part, f"{path}.{i}")]
    return []

"""Judges recorded attention with dropout, although what was dropped is unknown.

In: the recorded query, key and value, the result, and the gradients. Out: an opinion on each result. Whatever was dropped, VᵀdV
equals OᵀdO, and QᵀdQ equals dKᵀK: gradients are compared with that, and may lose what the CPU loses in a draw of its own. The sizes of
results and gradients are compared with their mean over all draws, within six standard deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tensorprobe.model import Call
from tensorprobe.model.measured import Opinion
from tensorprobe.ops import short_name
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.once import Replay
from tensorprobe.replay.randomness import argument_of, without_dropout

Tensors = Mapping[str, torch.Tensor]

_SIGMAS = 6.0
_TIMES, _TIMES_OF_ONE = 4.0, 10.0
"""The imbalance that a device may have, in multiples of that of the CPU's own draw: in the norm, in the largest element."""
_UNITS = 0.02
"""A smaller imbalance, in parts of the dtype's epsilon, counts as none: it is a sum over all rows."""
_PLACES = {"query": 0, "key": 1, "value": 2}


class _Sides(NamedTuple):
    """Two products that must be equal, and the sizes that their elements would have without cancellation."""

    difference: torch.Tensor
    size: torch.Tensor


class DroppedAttention:
    """One recorded call. CannotReplay if it is another kind of attention."""

    def __init__(self, call: Call, inputs: Tensors) -> None:
        trees = {name: argument_of(call, place, name, None) for name, place in _PLACES.items()}
        self._slots = {name: tree["slot"] for name, tree in trees.items() if isinstance(tree, dict) and "slot" in tree}
        calm = without_dropout(call) if short_name(call.op) == "scaled_dot_product_attention" else None
        if calm is None or len(self._slots) < len(_PLACES):
            raise CannotReplay("it draws random numbers, and one draw does not show how they are distributed")
        self._dtype = inputs[self._slots["query"]].dtype
        self.q, self.k, self.v = (inputs[self._slots[name]].double() for name in _PLACES)
        if not self.q.shape[:-2] == self.k.shape[:-2] == self.v.shape[:-2]:
            raise CannotReplay("it drops parts of an attention with groups of queries")
        self._drop = float(argument_of(call, 4, "dropout_p", 0.0))
        self._scale = float(argument_of(call, 6, "scale", None) or self.q.shape[-1] ** -0.5)
        keys = self.v.shape[-2]
        ones = torch.eye(keys, dtype=self._dtype).expand(*self.v.shape[:-1], keys)
        replay = Replay(calm, {**inputs, self._slots["value"]: ones}, device="cpu", precision="double")
        self._shares = replay.outputs["output.0"].detach().double()
        if not 0 < self._drop < 1 or not bool(self._shares.isfinite().all()):
            raise CannotReplay("it drops everything, or some rows attend to nothing")

    def slot(self, name: str) -> str:
        """Return the slot of a gradient, by the name of its argument."""
        return f"output{self._slots[name][5:]}"

    def judge_forward(self, result: torch.Tensor) -> Opinion:
        """Return an opinion: has the result the size that it has on average?"""
        mean = self._shares @ self.v
        return self._size(result.double(), mean, self._shares * (mean @ self.v.mT))

    def judge_backward(
        self, given: torch.Tensor, result: torch.Tensor, gradients: Tensors, own: Replay
    ) -> dict[str, Opinion]:
        """Return an opinion on each recorded gradient, by its slot. `own` is a draw of the CPU."""
        ours = own.gradients({"output.0": given})
        there = self._sides(given, result, gradients)
        here = self._sides(given, own.outputs["output.0"].detach(), ours)
        found = {}
        for name in _PLACES:
            slot = self.slot(name)
            if slot not in gradients:
                continue
            balance = self._balance(there[name], here[name]) if name in there and name in here else None
            size = self._size_of_gradient(name, given.double(), gradients[slot].double())
            found[slot] = size if balance is None or (balance.passes and not size.passes) else balance
        return found

    def _sides(self, given: torch.Tensor, result: torch.Tensor, gradients: Tensors) -> dict[str, _Sides]:
        q, k, v = (gradients.get(self.slot(name)) for name in _PLACES)
        found = {}
        if v is not None:
            found["value"] = _difference((self.v, v), (result, given))
        if q is not None and k is not None:
            found["query"] = found["key"] = _difference((self.q, q), (k, self.k))
        return found

    def _balance(self, there: _Sides, here: _Sides) -> Opinion:
        least = _UNITS * torch.finfo(self._dtype).eps
        (norm, peak), (own, own_peak) = (_relative(each) for each in (there, here))
        opinion = Opinion("balance of its gradients", norm, _TIMES * own + least)
        worst = Opinion("balance of one element of its gradients", peak, _TIMES_OF_ONE * own_peak + least)
        return worst if opinion.passes and not worst.passes else opinion

    def _size_of_gradient(self, name: str, given: torch.Tensor, gradient: torch.Tensor) -> Opinion:
        shares = self._shares
        if name == "value":
            mean = shares.mT @ given
            return self._size(gradient, mean, shares * (given @ mean.mT))
        moved = shares * (given @ self.v.mT)
        inner = self._scale * (moved - shares * moved.sum(-1, keepdim=True))
        mean = inner @ self.k if name == "query" else inner.mT @ self.q
        along = mean @ self.k.mT if name == "query" else self.q @ mean.mT
        return self._size(gradient, mean, self._scale * moved * (along - (shares * along).sum(-1, keepdim=True)))

    def _size(self, result: torch.Tensor, mean: torch.Tensor, moves: torch.Tensor) -> Opinion:
        """Return the distance of the result from its mean, along the mean. `moves` is how each dropped share changes it."""
        size = float(mean.square().sum().clamp_min(1e-300))
        off = abs(float(((result - mean) * mean).sum())) / size
        deviation = (self._drop / (1 - self._drop)) ** 0.5 * float(moves.norm()) / size
        return Opinion("size of a draw", off, _SIGMAS * deviation + 4 * torch.finfo(self._dtype).eps)


def _difference(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> _Sides:
    (a, b), (c, d) = ((left.double(), right.double()) for left, right in (one, other))
    sizes = [left.norm(dim=-2).unsqueeze(-1) * right.norm(dim=-2).unsqueeze(-2) for left, right in ((a, b), (c, d))]
    return _Sides(a.mT @ b - c.mT @ d, sizes[0] + sizes[1])


def _relative(sides: _Sides) -> tuple[float, float]:
    """Return the imbalance in the norm, and in the largest element."""
    size = sides.size.clamp_min(1e-300)
    return float(sides.difference.norm() / size.norm()), float((sides.difference.abs() / size).max())

"""Clean trainings under the watch: how many of the ATen calls are compared, and does any raise an alarm? For bench.online.

Six models with random weights train on the CPU, on the simulated device, and on one that adds up in another order than the CPU,
in float32, under autocast, and with weights in half precision. Nothing is wrong in any of these runs, so a call that fails is
a false alarm. Each is done without the watch too: losses and weights must be the same, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tensorprobe
from bench import zoo
from bench.online.faults import DEVICE, describe
from tensorprobe import sim
from tensorprobe.model.online import OnlineResult
from tensorprobe.model.reason import NotCompared
from tensorprobe.sim.faults import Fault

STEPS = 2
"""Momentum is first used in the second."""
SHOWN = 40
_OTHER_ORDER = [
    Fault(op=f"aten::{op}", kind="accumulate", dtype=dtype, params={"precision": "float32", "block": 16})
    for ops, dtype in ((("mm", "bmm", "sum"), None), (("addmm", "mean", "convolution_overrideable"), "float32"))
    for op in ops
]
"""In half precision the second three round more than once when they are done so, which is a fault and no other order."""
PLACES: dict[str, tuple[str, list[Fault]]] = {
    "cpu": ("cpu", []),
    "sim": (DEVICE, []),
    "sim, other sums": (DEVICE, _OTHER_ORDER),
}


@dataclass(frozen=True)
class Numbers:
    """The dtype of the weights, and that of autocast."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None


NUMBERS = {
    "fp32": Numbers(),
    "bf16 autocast": Numbers(autocast=torch.bfloat16),
    "fp16 autocast": Numbers(autocast=torch.float16),
    "bf16": Numbers(torch.bfloat16),
    "fp16": Numbers(torch.float16),
}


class Tagger(nn.Module):
    """Tokens in, a class for each out, by a two-layer LSTM that reads both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 96)
        self.lstm = nn.LSTM(96, 96, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(192, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])  # type: ignore[no-any-return]


def lstm() -> zoo.Made:
    model = Tagger()
    tokens, classes = torch.randint(500, (8, 24)), torch.randint(50, (8 * 24,))
    return model, lambda: nn.functional.cross_entropy(model(tokens).flatten(0, 1), classes)


MODELS: dict[str, Callable[[], zoo.Made]] = {
    **{name: zoo.MODELS[name] for name in ("bert", "llama", "qwen-moe", "vit", "resnet")},
    "lstm": lstm,
}


class Training:
    """A model of the zoo with its optimizer, made anew on a device."""

    def __init__(self, model: str, device: str, numbers: Numbers) -> None:
        torch.manual_seed(5)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(numbers.weights)
        try:
            with torch.device(device):
                self.model, self.loss = MODELS[model]()
        finally:
            torch.set_default_dtype(usual)
        self.model.train()
        # Its usual 1e-8 is zero in float16, and a division by it would leave no number to compare.
        eps = 1e-4 if numbers.weights is torch.float16 else 1e-8
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=eps)
        self.device, self.autocast = device, numbers.autocast

    def run(self) -> list[Tensor]:
        """Everything that a training leaves: losses, then weights."""
        losses = []
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            with torch.autocast(self.device, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                loss = self.loss()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return [each.detach().cpu() for each in (*losses, *self.model.parameters())]


def watch_clean(model: str, place: str, numbers: str, reference: str) -> dict[str, Any]:
    """The counts, failures and skips of one clean training."""
    device, faults = PLACES[place]
    about = {"model": model, "place": place, "numbers": numbers, "reference": reference}
    with sim.installed(faults):
        try:
            plain = Training(model, device, NUMBERS[numbers]).run()
        except RuntimeError as error:  # for instance oneDNN, whose LSTM is not there in bfloat16 on every machine
            return {**about, "note": f"torch itself cannot: {str(error).splitlines()[0]}"}
        training = Training(model, device, NUMBERS[numbers])
        with tensorprobe.online(training.model, reference=reference, on_fail="report") as watching:
            watched = training.run()
    result = watching.result
    return {
        **about,
        "changed_training": not all(map(same_bits, plain, watched)),
        "finite": bool(all(each.isfinite().all() for each in plain)),
        "seen": result.seen,
        "compared": result.compared,
        **shares(result),
        "skipped": result.skipped,
        "failed": result.failed,
        "failures": [describe(row) for row in result.failures[:SHOWN]],
        "failing_ops": {op: count.failed for op, count in result.ops.items() if count.failed},
        "blind_spots": result.blind_spots,
        **({"error": result.first_error} if result.broken or not result.compared else {}),
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where it is no number."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


_COMPUTE_NOTHING = (NotCompared.MEMORY, NotCompared.STORAGE, NotCompared.NO_TENSOR)


def shares(result: OnlineResult) -> dict[str, Any]:
    """The share that is compared, of the calls that are neither views nor random, and of those that compute.

    `not_compared` says what else was left out. Those of them that compute nothing make memory without writing to it, change
    which memory a tensor has, or give no number.
    """
    rest: dict[str, int] = {}
    computing = 0
    for reason, ops in result.skipped.items():
        for op, count in ops.items():
            if reason not in (NotCompared.VIEW, NotCompared.RANDOM) and not is_view(op):
                rest[f"{op.removeprefix('Aten.')}: {reason}"] = count
                computing += count if reason not in _COMPUTE_NOTHING else 0
    return {
        "share": result.compared / max(result.compared + sum(rest.values()) + result.broken, 1),
        "share_of_computing": result.compared / max(result.compared + computing + result.broken, 1),
        "not_compared": rest,
    }


def is_view(op: str) -> bool:
    """Whether the schema of `Aten.detach.default` calls it a view."""
    name, _, overload = op.removeprefix("Aten.").rpartition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return found is not None and found.is_view


def watch_all(model: str, places: list[str], numbers: list[str], references: list[str]) -> Iterator[dict[str, Any]]:
    """Every clean training of a model; what raises is a failed measurement."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("tensorprobe").setLevel(logging.ERROR)  # failures are what is counted here
    for place in places:
        for number in numbers:
            for reference in references:
                if reference == "cpu" and not PLACES[place][1]:
                    continue  # the same kernels on the same numbers: nothing could differ
                try:
                    yield watch_clean(model, place, number, reference)
                except Exception as error:
                    about = {"model": model, "place": place, "numbers": number, "reference": reference}
                    yield {**about, "error": f"{type(error).__name__}: {error}"}

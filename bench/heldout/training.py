"""A small training: a model, an optimizer, a loss, and what happens between them. Families of models build on this.

Weights and data are drawn on the CPU from seeds of their own and then moved, so two devices start from equal bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PRECISIONS = {
    "fp32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "half-autocast": (torch.float32, torch.float16),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
}
"""The dtype of weights and data, and that of autocast."""


@dataclass(frozen=True)
class Setup:
    """Where and in which precision a training runs."""

    device: str = "cpu"
    precision: str = "fp32"
    stream: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(77), compare=False)
    """Data come from a stream of their own, whatever the model has drawn for its weights."""

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision][0]

    def place(self, value: Any) -> Any:
        """Move a module or a tensor; floating-point values get the dtype of the weights."""
        if isinstance(value, Tensor) and not value.is_floating_point():
            return value.to(self.device)
        return value.to(device=self.device, dtype=self.dtype)

    def randn(self, *shape: int) -> Tensor:
        placed: Tensor = self.place(torch.randn(*shape, generator=self.stream))
        return placed

    def rand(self, *shape: int) -> Tensor:
        placed: Tensor = self.place(torch.rand(*shape, generator=self.stream))
        return placed

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.stream).to(self.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        narrow = PRECISIONS[self.precision][1]
        return contextlib.nullcontext() if narrow is None else torch.autocast(self.device, dtype=narrow)


class Training:
    """Step by step: loss, backward, optimizer. Families with other steps override `step`, and call `update` in it."""

    def __init__(
        self, setup: Setup, model: nn.Module, loss: Callable[[int], Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.setup, self.model, self.loss, self.optimizer = setup, model, loss, optimizer
        self.after_backward: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        with self.setup.autocast():
            value = self.loss(number)
        value.backward()
        self.update()

    def update(self) -> None:
        for each in self.after_backward:
            each()
        self.optimizer.step()
        for each in self.after_step:
            each()


Family = Callable[[Setup], Training]


@dataclass(frozen=True)
class Entry:
    """A family: how it is built, its precisions (the first is used where one must do), and its number of processes."""

    build: Family
    precisions: str = "fp32"
    ranks: int = 1

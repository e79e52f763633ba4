"""A library of ops whose kernels are wrong in float32 and right in float64: faults to find without a device.

`double(x)` is 2x, too large by a hundredth; `double_(x)` the same in place; `spoil(x)` is x, but one more and at its first place
not a number; `refuse(x)` has a kernel for float32 only; `shade(x, mask)` is x + mask, but one percent more where the mask is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

NAME = "tensorprobe_faulty"
DOUBLE = f"Aten.{NAME}.double.default"
SCHEMAS = [
    "double(Tensor x) -> Tensor",
    "double_(Tensor(a!) x) -> Tensor(a!)",
    "spoil(Tensor x) -> Tensor",
    "refuse(Tensor x) -> Tensor",
    "shade(Tensor x, Tensor mask) -> Tensor",
]


def _wrong(x: torch.Tensor) -> float:
    return 2.02 if x.dtype is torch.float32 else 2.0


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * _wrong(x)


def _double_(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(_wrong(x))


def _spoil(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        return x.clone()
    out = x + 1
    out.view(-1)[0] = torch.nan
    return out


def _refuse(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("only float32")
    return x.clone()


def _shade(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask == 0, x * _wrong(x) / 2, x + mask)


_kept: list[torch.library.Library] = []


@contextmanager
def installed() -> Iterator[None]:
    """The library, for as long as the `with` lasts."""
    if _kept:
        yield
        return
    library = torch.library.Library(NAME, "FRAGMENT")
    for schema, kernel in zip(SCHEMAS, (_double, _double_, _spoil, _refuse, _shade), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "CPU")
    try:
        yield
    finally:
        if hasattr(library, "_destroy"):
            library._destroy()
        else:  # torch before 2.3 cannot take it away
            _kept.append(library)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tensorprobe_faulty.double(x)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.ops.tensorprobe_faulty.double(gradients[0])


class Doubled(nn.Module):
    """Wrong in forward and in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Doubled(), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

"""A pair of programs, and the training that records each of them.

A program is a dictionary of choices: the model, its data and loss, the optimizer, where it runs. Both programs of a pair compute
the same, unless the candidate has a fault; they differ in the calls that they make.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import tensorprobe
from bench.heldout.device import use_second_device
from bench.heldout.record import join, start

Choices = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Two programs. In a pair with a fault, one of the calls in `guilty` is to be named, alone or in a region."""

    name: str
    baseline: Choices
    candidate: Choices
    guilty: tuple[str, ...] = ()
    """Parts of names of calls; for what no call made, of parameters."""
    step: int = 0
    options: Choices = field(default_factory=dict)
    """Of the comparison."""


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **({"lr": 1e-2, "foreach": False} | options))


def kind_of(kind: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, **({"lr": 1e-3} | options))


DEFAULT: Choices = {
    "optimizer": sgd(),
    "clip": None,
    "steps": 2,
    "ranks": 1,
    "device": "cpu",
    "dtype": torch.float32,
    "wrap": None,
    "before_step": None,
    "settings": {},
}


def record(out: Path, choices: Choices) -> None:
    """Record a program, each rank in a fork of this process."""
    chosen = DEFAULT | choices
    for each in [start(_train, rank, out, chosen) for rank in range(chosen["ranks"])]:
        join(each)


def _train(rank: int, out: Path, chosen: Choices) -> None:
    warnings.simplefilter("ignore")
    where = chosen["device"]
    torch.set_num_threads(2 if where == "threads" else 1)
    device = "npu" if where == "npu" else "cpu"
    if device == "npu":
        tensorprobe.sim.enable(device)
    if chosen["ranks"] > 1:
        store = distributed.FileStore(f"{out}.store", chosen["ranks"])
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=chosen["ranks"])
    torch.manual_seed(0)
    model: nn.Module = chosen["model"]().to(device, chosen["dtype"])
    run = model if chosen["wrap"] is None else chosen["wrap"](model)
    optimizer = chosen["optimizer"](model.parameters())
    if where == "second":
        use_second_device()
    with tensorprobe.capture(out, model=model, steps_by="optimizer", in_process=True, **chosen["settings"]):
        for step in range(chosen["steps"]):
            generator = torch.Generator().manual_seed(step)
            inputs, target = chosen["batch"](generator)
            if chosen["ranks"] > 1:
                inputs, target = (each.chunk(chosen["ranks"])[rank] for each in (inputs, target))
            if inputs.is_floating_point():
                inputs = inputs.to(chosen["dtype"])
            loss: Tensor = chosen["loss"](run(inputs.to(device)), target.to(device))
            loss.backward()
            if chosen["clip"] is not None:
                nn.utils.clip_grad_norm_(model.parameters(), **chosen["clip"])
            if chosen["before_step"] is not None:
                chosen["before_step"](model, step)
            optimizer.step()
            optimizer.zero_grad()
    if chosen["ranks"] > 1:
        distributed.destroy_process_group()


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def wrong_gradient(x: Tensor, factor: float = 1.01) -> Tensor:
    """Return x; its gradient is too large."""
    return _WrongGradient.apply(x, factor)


def off(function: Callable[..., Tensor], factor: float = 1.001) -> Callable[..., Tensor]:
    """Return the function with a result that is too large."""
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


def off_at_the_end(function: Callable[..., Tensor], columns: int = 2) -> Callable[..., Tensor]:
    """Return the function with zeros in the last columns of its result."""

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        made = function(*args, **kwargs)
        keep = torch.ones(made.shape[-1], device=made.device)
        keep[-columns:] = 0
        return made * keep

    return wrong


def backwards_off(function: Callable[..., Tensor], factor: float = 1.01) -> Callable[..., Tensor]:
    """Return the function with a gradient that is too large."""
    return lambda *args, **kwargs: wrong_gradient(function(*args, **kwargs), factor)


def with_choices(base: Choices, build: Callable[..., nn.Module], **steps: Any) -> Choices:
    """Return a program whose model is built with these steps; choices of the training are among them by name."""
    own = {name: value for name, value in steps.items() if name in DEFAULT or name in ("batch", "loss")}
    rest = {name: value for name, value in steps.items() if name not in own}
    return base | own | {"model": partial(build, **rest)}

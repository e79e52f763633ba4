"""Planted overflows in backward, in optimizers, under checkpointing and gradient scaling. For bench.overflow."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.overflow.case import Planted, Watching, plants
from tensorprobe import torch_names

TRAINING: dict[str, Planted] = {}
plant = functools.partial(plants, TRAINING)
HALF = torch.float16


@plant("Tensor.mul.0.backward inf")
def exploding_gradient(watching: Watching) -> None:
    x, weight = torch.full((3,), 1e-30, requires_grad=True), torch.tensor(1e20)
    with watching():
        ((x * weight) * weight).sum().backward()


@plant("Functional.linear.1.backward inf")
def exploding_gradient_in_a_deep_net(watching: Watching) -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    for layer in layers:
        nn.init.constant_(layer.weight, 1e15)
    with watching(layers):
        layers(torch.full((1, 4), 1e-37)).mul(1e-5).mean().backward()


@plant("Torch.sqrt.0.backward inf")
def gradient_of_a_norm_at_zero(watching: Watching) -> None:
    x = torch.zeros(3, requires_grad=True)
    with watching():
        torch.sqrt((x**2).sum()).backward()


@plant("Torch.sqrt.0.backward nan")
def gradient_hidden_by_where(watching: Watching) -> None:
    x = torch.tensor([4.0, 0.0], requires_grad=True)
    with watching():
        torch.where(x > 0, torch.sqrt(x), torch.zeros(2)).sum().backward()


@plant("Tensor.float.0.backward inf")
def negative_gradient_cast_to_half(watching: Watching) -> None:
    """Minus infinity, but no mask: it is a gradient."""
    weight = torch.ones(3, dtype=HALF, requires_grad=True)
    with watching():
        (weight.float() * -1e10).sum().backward()


@plant("Tensor.pow.0.backward inf")
def gradient_of_a_root(watching: Watching) -> None:
    x = torch.zeros(3, requires_grad=True)
    with watching():
        x.pow(0.5).sum().backward()


@plant("Torch.sqrt.0.backward inf")
def gradient_penalty(watching: Watching) -> None:
    x, weight = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with watching():
        (gradient,) = torch.autograd.grad((x * weight).sum(), x, create_graph=True)
        (torch.sqrt((gradient**2).sum()) - 1).square().backward()


@plant("Torch.linalg.eigh.0.backward nan")
def gradient_of_equal_eigenvalues(watching: Watching) -> None:
    matrix = torch.eye(3, requires_grad=True)
    with watching():
        torch.linalg.eigh(matrix).eigenvectors.abs().sum().backward()


@plant("Torch.logsumexp.0.backward nan")
def gradient_of_a_masked_row(watching: Watching) -> None:
    scores = torch.randn(2, 4, requires_grad=True)
    with watching():
        masked = scores.masked_fill(torch.tensor([[True], [False]]), -torch.inf)
        torch.logsumexp(masked, -1).exp().sum().backward()


@plant("Torch.exp.0.forward inf")
def inside_a_checkpoint(watching: Watching) -> None:
    x = torch.full((3,), 100.0, requires_grad=True)
    with watching():
        checkpoint(lambda y: torch.exp(y).clamp(max=9.0), x, use_reentrant=False).sum().backward()


@plant("Torch.exp.0.forward inf")
def inside_a_reentrant_checkpoint(watching: Watching) -> None:
    x = torch.full((3,), 100.0, requires_grad=True)
    with watching():
        checkpoint(lambda y: torch.exp(y).clamp(max=9.0), x, use_reentrant=True).sum().backward()


@plant("Torch.sqrt.0.backward inf")
def in_the_backward_of_a_checkpoint(watching: Watching) -> None:
    x = torch.zeros(3, requires_grad=True)
    with watching():
        checkpoint(lambda y: torch.sqrt(y * 2), x, use_reentrant=False).sum().backward()


@plant("Torch.sqrt.0.backward inf")
def in_the_backward_of_a_reentrant_checkpoint(watching: Watching) -> None:
    x = torch.zeros(3, requires_grad=True)
    with watching():
        checkpoint(lambda y: torch.sqrt(y * 2), x, use_reentrant=True).sum().backward()


class ScaledBack(torch.autograd.Function):
    """Divides by a norm of zero in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / x.norm()


@plant("Tensor.div.0.forward inf")
def in_the_backward_of_a_custom_function(watching: Watching) -> None:
    x = torch.zeros(3, requires_grad=True)
    with watching():
        (ScaledBack.apply(x) + 1).sum().backward()


@plant("Tensor.div.0.forward inf")
def in_a_hook_of_a_tensor(watching: Watching) -> None:
    x = torch.ones(3, requires_grad=True)
    with watching():
        y = x * 2
        y.register_hook(lambda gradient: gradient / torch.zeros(()))
        y.sum().backward()


@plant(arrivals=("Tensor.exp.0.backward had gradient",))
def sum_of_gradients(watching: Watching) -> None:
    """The engine adds up what two calls give, in no call at all."""
    x = torch.full((3,), -10.0, requires_grad=True)
    with watching():
        y = x.exp()
        (y * 2e38 + y * 2e38).sum().backward()


@plant(arrivals=("Tensor.add_.0.forward had gradient of weight",))
def accumulated_over_two_batches(watching: Watching) -> None:
    linear = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, foreach=False)
    with watching(linear):
        for _ in range(2):
            linear(torch.full((1, 2), 3e38)).mul(1e-3).sum().mul(1e3).backward()
        optimizer.step()


@plant("Torch.sqrt.0.backward inf")
def in_torch_autograd_grad(watching: Watching) -> None:
    x = torch.zeros(3, requires_grad=True)
    with watching():
        torch.autograd.grad(torch.sqrt(x).sum(), x)


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
    (model(torch.full((1, 2), scale, dtype=next(model.parameters()).dtype)).sum()).backward()
    optimizer.step()


def half_linear() -> nn.Linear:
    linear = nn.Linear(2, 1, bias=False).half()
    nn.init.constant_(linear.weight, 1e-3)
    return linear


@plant("Tensor.addcmul_.0.forward inf")
def second_moment_of_adamw_in_fp16(watching: Watching) -> None:
    linear = half_linear()
    optimizer = torch.optim.AdamW(linear.parameters(), foreach=False)
    with watching(linear):
        train_once(linear, optimizer, 1e4)


@plant("Torch._foreach_addcmul_.0.forward inf")
def second_moment_of_foreach_adamw_in_fp16(watching: Watching) -> None:
    linear = half_linear()
    optimizer = torch.optim.AdamW(linear.parameters(), foreach=True)
    with watching(linear):
        train_once(linear, optimizer, 1e4)


@plant("Torch._fused_adamw_.0.forward inf")
def second_moment_of_fused_adamw(watching: Watching) -> None:
    linear = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    with watching(linear):
        linear(torch.full((1, 2), 1e-5)).mul(1e30).sum().backward()
        optimizer.step()


@plant("Tensor.addcdiv_.0.forward nan")
def eps_of_adamw_lost_in_fp16(watching: Watching) -> None:
    linear = half_linear()
    optimizer = torch.optim.AdamW(linear.parameters(), foreach=False)
    with watching(linear):
        train_once(linear, optimizer, 0.0)


@plant("Tensor.add_.0.forward inf")
def learning_rate_of_sgd(watching: Watching) -> None:
    linear = half_linear()
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e3, foreach=False)
    with watching(linear):
        train_once(linear, optimizer, 1e3)
        train_once(linear, optimizer, 1.0)


@plant("Torch.sqrt.0.backward inf")
def clipped_after_it_exploded(watching: Watching) -> None:
    linear = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(linear.weight)
    optimizer = torch.optim.AdamW(linear.parameters())
    with watching(linear):
        torch.sqrt(linear(torch.ones(1, 2))).sum().backward()
        nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        optimizer.step()
        linear(torch.ones(1, 2)).sum()


def scaled_training(watching: Watching, weight: float, scale: float, *, steps: int = 2, target: float = 0.0) -> None:
    """Steps of fp16 autocast with a scaler; the scale may be too large at first."""
    device = torch.empty(0).device.type
    linear = nn.Linear(4, 4, bias=False)
    nn.init.constant_(linear.weight, weight)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-3)
    scaler = torch_names.GradScaler(device, init_scale=scale, backoff_factor=2.0**-20)
    with watching(linear):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=HALF):
                hidden = linear(torch.full((2, 4), 8.0))
            scaler.scale(F.mse_loss(hidden.float(), torch.full((2, 4), target))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@plant(skipped=("Tensor.float.0.backward",))
def step_skipped_by_a_scaler(watching: Watching) -> None:
    """The gradient of a cast to float32 is a cast to float16: there it overflows."""
    scaled_training(watching, 0.5, 2.0**14)


@plant(skipped=("Tensor.mul.0.forward", "Tensor.float.0.backward"))
def scaled_loss_is_infinite(watching: Watching) -> None:
    """Multiplying the loss by the scale overflows; its gradient is finite, and overflows in float16."""
    scaled_training(watching, 0.5, 1e30, steps=1, target=1e5)


@plant()
def scaler_that_skips_nothing(watching: Watching) -> None:
    scaled_training(watching, 0.5, 16.0)


@plant("Functional.linear.0.forward inf")
def forward_under_a_scaler(watching: Watching) -> None:
    scaled_training(watching, 1e4, 1.0, steps=1)

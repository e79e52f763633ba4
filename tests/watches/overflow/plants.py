"""Small trainings with something not finite planted in them, and what the watch has to say of each.

`PLANTS`: name → (program, expected). A program gets nothing and trains. Expected: `(call, kind)` of the first finding,
`came in: ...` for what no call has made, or None where nothing may be blamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INF = math.inf
Expected = tuple[str, str] | str | None
PLANTS: dict[str, tuple[Callable[[], Any], Expected]] = {}


def plant(expected: Expected) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(program: Callable[[], Any]) -> Callable[[], Any]:
        PLANTS[program.__name__] = (program, expected)
        return program

    return add


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int, outputs: int, seed: int = 1) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(numbers(outputs, inputs, seed=seed))
        layer.bias.zero_()
    return layer


def train(loss: Tensor, *modules: nn.Module) -> None:
    loss.backward()
    torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01).step()


class Attention(nn.Module):
    """One head, written out. `mask` is applied to the scores by the function given."""

    def __init__(self, mask: Callable[[Tensor], Tensor], scale: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.mask, self.scale = linear(8, 24), mask, scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.softmax(self.mask((q * self.scale) @ k.transpose(-2, -1)), -1) @ v


def attend(mask: Callable[[Tensor], Tensor]) -> None:
    layer = Attention(mask)
    train(layer(numbers(2, 6, 8)).pow(2).mean(), layer)


FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)


@plant(None)
def plain() -> None:
    layer = linear(4, 4)
    train(layer(numbers(3, 4)).relu().mean(), layer)


@plant(None)
def mask_by_masked_fill() -> None:
    attend(lambda scores: scores.masked_fill(FUTURE, -INF))


@plant(None)
def mask_by_where() -> None:
    attend(lambda scores: torch.where(FUTURE, torch.tensor(-INF), scores))


@plant(None)
def mask_by_full_and_triu() -> None:
    attend(lambda scores: scores + torch.full((6, 6), -INF).triu(1))


@plant(None)
def mask_made_before() -> None:
    attend(lambda scores: scores + ADDITIVE)


ADDITIVE = torch.zeros(6, 6).masked_fill(FUTURE, -INF)


@plant(None)
def mask_by_setitem() -> None:
    def mask(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, FUTURE] = -INF
        return scores

    attend(mask)


@plant(None)
def mask_by_log_of_zero() -> None:
    attend(lambda scores: scores + (~FUTURE).float().log())


@plant(None)
def mask_by_cast_to_half() -> None:
    attend(lambda scores: scores + (FUTURE.float() * torch.finfo(torch.float32).min).half())


@plant(None)
def running_minimum() -> None:
    lowest = torch.full((3,), INF)
    for seed in range(3):
        lowest = torch.minimum(lowest, numbers(3, seed=seed))


@plant(None)
def memory_that_is_being_filled() -> None:
    room = torch.empty(4, 4)
    room[0] = 1.0
    room[1:] = numbers(3, 4)
    room.mul(2).sum()


@plant(None)
def clamped_to_the_limit() -> None:
    numbers(4).half().clamp(min=torch.finfo(torch.float16).min, max=torch.finfo(torch.float16).max).add(1)


@plant(("Tensor.matmul.0.forward", "inf"))
def half_attention_overflows() -> None:
    q = torch.full((4, 8), 200.0, dtype=torch.float16)
    F.softmax(q @ q.t(), -1)


@plant(("Functional.softmax.0.forward", "nan"))
def row_masked_everywhere() -> None:
    everywhere = FUTURE.clone()
    everywhere[2] = True
    attend(lambda scores: scores.masked_fill(everywhere, -INF))


@plant(("Tensor.mul.1.forward", "nan"))
def mask_times_zero() -> None:
    attend(lambda scores: scores + FUTURE.float() * -INF)


@plant(("Tensor.sqrt.0.forward", "nan"))
def true_nan_behind_a_mask() -> None:
    attend(lambda scores: scores.sqrt().masked_fill(FUTURE, -INF))


@plant(("Tensor.add.2.forward", "inf"))
def overflow_beside_a_mask() -> None:
    attend(lambda scores: (scores * 0 + 3e38) + (ADDITIVE + (~FUTURE).float() * 3e38))


@plant(("Tensor.log.0.forward", "inf"))
def log_of_zero() -> None:
    layer = linear(4, 4)
    train(-layer(numbers(3, 4)).relu().log().mean(), layer)


@plant(("Tensor.log.0.forward", "inf"))
def entropy_of_zero() -> None:
    p = torch.tensor([0.0, 0.5, 0.5])
    (p * p.log()).sum()


@plant(("Tensor.div.0.forward", "nan"))
def norm_divides_by_zero() -> None:
    x = torch.zeros(3, 4)
    (x / x.norm(dim=-1, keepdim=True)).sum()


@plant(("Tensor.div_.0.forward", "inf"))
def division_in_place() -> None:
    numbers(3).div_(0.0)


@plant(None)
def relu_in_place_is_innocent() -> None:
    F.relu(numbers(3, 4), inplace=True).sum()


@plant(("Torch.exp.0.forward", "inf"))
def exponential_explodes() -> None:
    layer = linear(4, 4)
    train(torch.exp(layer(numbers(3, 4)) * 1000).mean(), layer)


@plant(("Tensor.sqrt.0.backward", "inf"))
def gradient_of_a_root_at_zero() -> None:
    layer = linear(4, 4)
    train((layer(numbers(3, 4)) * 0).sqrt().mean(), layer)


@plant(("Tensor.sqrt.0.backward", "nan"))
def nan_gradient_of_what_was_not_chosen() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    torch.where(x > 0, x.sqrt(), torch.zeros(2)).sum().backward()


@plant(("Functional.linear.0.backward", "inf"))
def gradient_explodes() -> None:
    layer = linear(4, 4)
    layer(numbers(3, 4) * 1e-30 + 1.0).backward(torch.full((3, 4), 3e38))


@plant("came in: input")
def nan_in_data() -> None:
    layer, batch = linear(4, 4), numbers(3, 4)
    batch.view(-1).numpy()[5] = math.nan
    train(layer(batch).mean(), layer)


@plant("came in: number")
def nan_as_a_number() -> None:
    torch.tensor([1.0, math.nan]).add(1.0)


@plant("came in: parameter weight")
def nan_in_weights() -> None:
    train(MODEL(numbers(3, 4)).mean(), MODEL)


MODEL = linear(4, 4)


@plant("came in: uninitialised memory")
def memory_that_nobody_filled() -> None:
    room = torch.empty(4, 4)
    room.numpy()[:] = math.nan
    room.add(1.0)


class Halving(torch.autograd.Function):
    """Its backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / torch.zeros(())


@plant(("Tensor.div.1.forward", "inf"))
def custom_function_backward() -> None:
    layer = linear(4, 4)
    train(Halving.apply(layer(numbers(3, 4))).mean(), layer)


class Bursting(torch.autograd.Function):
    """Its forward overflows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.exp(x + 1000)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@plant(("Torch.exp.0.forward", "inf"))
def custom_function_forward() -> None:
    layer = linear(4, 4)
    train(Bursting.apply(layer(numbers(3, 4))).mean(), layer)


def checkpointed(reentrant: bool) -> None:
    layer = linear(4, 4)

    def block(x: Tensor) -> Tensor:
        return layer(torch.exp(x * 200))

    inputs = numbers(3, 4).requires_grad_()
    train(checkpoint(block, inputs, use_reentrant=reentrant).mean(), layer)


@plant(("Torch.exp.0.forward", "inf"))
def in_a_checkpoint() -> None:
    checkpointed(False)


@plant(("Torch.exp.0.forward", "inf"))
def in_a_reentrant_checkpoint() -> None:
    checkpointed(True)


@plant(("Tensor.add_.0.forward", "inf"))
def in_the_optimizer() -> None:
    layer = nn.Linear(4, 1, bias=False)
    (layer(torch.ones(3, 4)).sum() * 9).backward()
    torch.optim.SGD(layer.parameters(), lr=3e38, foreach=False).step()


@plant(("Tensor.to.0.forward", "inf"))
def cast_that_does_not_fit() -> None:
    layer = linear(4, 4)
    big = (layer(numbers(3, 4)) * 1e6).to(torch.float16)
    train(big.float().mean(), layer)


@plant(("Functional.cross_entropy.0.forward", "inf"))
def target_behind_a_mask() -> None:
    logits = numbers(2, 4).masked_fill(torch.tensor([True, False, False, False]), -INF)
    F.cross_entropy(logits, torch.tensor([0, 1]))


@plant(("Torch.einsum.0.forward", "inf"))
def product_of_large_halves() -> None:
    big = torch.full((4, 4), 3e3, dtype=torch.float16)
    torch.einsum("ij,jk->ki", big, big).t().contiguous()


@plant(("Torch.var.0.forward", "nan"))
def variance_of_one() -> None:
    layer = linear(4, 1)
    train(torch.var(layer(numbers(1, 4)), dim=-1).sum(), layer)

"""Planted overflows in forward: the numbers become too large, or are none. For bench.overflow."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from bench.overflow.case import Planted, Watching, plants

FORWARD: dict[str, Planted] = {}
plant = functools.partial(plants, FORWARD)
HALF = torch.float16


@plant("Tensor.matmul.0.forward inf")
def fp16_attention(watching: Watching) -> None:
    query = torch.full((1, 4, 64), 40.0, dtype=HALF)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    with watching():
        scores = query @ query.transpose(-2, -1) / 8
        F.softmax(scores.masked_fill(future, -torch.inf), -1) @ query


@plant("Torch.log.0.forward inf")
def log_of_zero(watching: Watching) -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.75])
    with watching():
        -torch.log(probabilities).mean()


@plant("Tensor.log.0.forward inf")
def entropy_of_zero(watching: Watching) -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.75])
    with watching():
        -(probabilities * probabilities.log()).sum()


@plant("Tensor.div.0.forward nan")
def zero_norm(watching: Watching) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    with watching():
        rows / rows.norm(dim=1, keepdim=True)


@plant("Torch.rsqrt.0.forward inf")
def rms_norm_without_eps(watching: Watching) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    with watching():
        rows * torch.rsqrt(rows.square().mean(-1, keepdim=True))


@plant("Tensor.__pow__.0.forward inf")
def fp16_square_in_norm(watching: Watching) -> None:
    rows = torch.full((2, 8), 300.0, dtype=HALF)
    with watching():
        rows * torch.rsqrt((rows**2).mean(-1, keepdim=True) + 1e-6)


@plant("Torch.exp.0.forward inf")
def exp_overflow(watching: Watching) -> None:
    x = torch.tensor([1.0, 89.0])
    with watching():
        torch.exp(x).clamp(max=1e6).sum()


@plant("Torch.cumprod.0.forward inf")
def cumprod_overflow(watching: Watching) -> None:
    x = torch.full((20,), 1e4)
    with watching():
        torch.cumprod(x, 0)


@plant("Torch.sqrt.0.forward nan")
def sqrt_of_negative(watching: Watching) -> None:
    variance = torch.tensor([1.0, -1e-9])
    with watching():
        torch.sqrt(variance) + 1


@plant("Torch.acos.0.forward nan")
def acos_beyond_one(watching: Watching) -> None:
    cosine = torch.tensor([0.5, 1.0000001])
    with watching():
        torch.acos(cosine).sum()


@plant("Tensor.half.0.forward inf")
def cast_to_half(watching: Watching) -> None:
    x = torch.tensor([1.0, 7e4])
    with watching():
        x.half() * 0.5


@plant("Tensor.to.0.forward inf")
def cast_of_negative_to_half(watching: Watching) -> None:
    x = torch.tensor([1.0, -7e4])
    with watching():
        x.to(HALF).mean()


@plant("Tensor.to.0.forward inf")
def cast_to_float8(watching: Watching) -> None:
    x = torch.tensor([1.0, 1e6])
    with watching():
        x.to(torch.float8_e5m2).float().sum()


@plant("Tensor.sum.0.forward inf")
def fp16_sum(watching: Watching) -> None:
    x = torch.full((128,), 1000.0, dtype=HALF)
    with watching():
        x.sum() / 128


@plant("Torch.reciprocal.0.forward inf")
def division_hidden_by_where(watching: Watching) -> None:
    x = torch.tensor([2.0, 0.0], requires_grad=True)
    with watching():
        torch.where(x == 0, torch.zeros(2), torch.reciprocal(x)).sum().backward()


@plant("Tensor.div.0.forward nan")
def complex_division(watching: Watching) -> None:
    x = torch.zeros(3, dtype=torch.complex64)
    with watching():
        x / x


@plant("Functional.conv2d.0.forward inf")
def convolution(watching: Watching) -> None:
    images = torch.full((1, 2, 4, 4), 1e20).to(memory_format=torch.channels_last)
    conv = nn.Conv2d(2, 3, 3)
    nn.init.constant_(conv.weight, 1e20)
    with watching(conv):
        F.relu(conv(images)).mean().backward()


@plant("Torch.exp.0.forward inf")
def one_of_many(watching: Watching) -> None:
    x = torch.zeros(300_001)
    x[-1] = 100
    with watching():
        torch.exp(x)


@plant("Functional.softmax.0.forward nan")
def fully_masked_row(watching: Watching) -> None:
    scores = torch.randn(3, 4)
    hidden = torch.tensor([[True], [False], [False]]).expand(3, 4)
    with watching():
        F.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ torch.ones(4, 2)


@plant("Functional.softmax.0.forward nan")
def padding_only_in_multihead_attention(watching: Watching) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 3, 8), torch.tensor([[True] * 3, [False] * 3])
    with watching(attention):
        attention(x, x, x, key_padding_mask=padding)


@plant("Tensor.sub.0.forward nan")
def inf_minus_inf_behind_a_mask(watching: Watching) -> None:
    scores = torch.randn(3, 4).masked_fill(torch.tensor([[True], [False], [False]]), -torch.inf)
    with watching():
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights / weights.sum(-1, keepdim=True)


@plant("Tensor.mul.0.forward nan")
def zero_times_infinity(watching: Watching) -> None:
    keep = torch.tensor([1.0, 0.0, 1.0])
    with watching():
        mask = torch.zeros(3).masked_fill(keep == 0, -torch.inf)
        F.softmax(mask * keep, -1)


@plant("Torch.sqrt.0.forward nan")
def a_true_nan_beside_a_mask(watching: Watching) -> None:
    x, hidden = torch.tensor([[4.0, 1.0, -1.0]]), torch.tensor([False, True, False])
    with watching():
        F.softmax(torch.sqrt(x.masked_fill(hidden, torch.inf)).masked_fill(hidden, -torch.inf), -1)


@plant("Tensor.add.0.forward inf")
def two_fp16_masks_on_one_row(watching: Watching) -> None:
    least = torch.full((2, 3), torch.finfo(HALF).min, dtype=HALF)
    with watching():
        F.softmax(least + least, -1)


@plant("Functional.cross_entropy.0.forward inf")
def target_behind_a_mask(watching: Watching) -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    with watching():
        masked = logits.masked_fill(torch.tensor([False, True, False, False]), -torch.inf)
        F.cross_entropy(masked, torch.tensor([0, 1])).backward()


@plant("Functional.nll_loss.0.forward inf")
def target_behind_a_mask_in_two_calls(watching: Watching) -> None:
    logits = torch.randn(2, 4).masked_fill(torch.tensor([False, True, False, False]), -torch.inf)
    with watching():
        F.nll_loss(F.log_softmax(logits, -1), torch.tensor([0, 1]))


@plant("Functional.layer_norm.0.forward nan")
def constant_row_in_layer_norm(watching: Watching) -> None:
    norm = nn.LayerNorm(4, eps=0)
    with watching(norm):
        norm(torch.ones(2, 4)).sum().backward()


@plant("Functional.batch_norm.0.forward nan")
def no_variance_in_an_evaluated_batch_norm(watching: Watching) -> None:
    norm = nn.BatchNorm1d(3, eps=1e-60).eval()  # torch 2.11 refuses 0
    norm.running_var.zero_()
    with watching(norm):
        norm(torch.ones(4, 3))


@plant("Torch.log.0.forward inf")
def gumbel_noise_of_zero(watching: Watching) -> None:
    uniform = torch.tensor([0.5, 0.0])
    with watching():
        -torch.log(-torch.log(uniform))


@plant("Tensor.mul.0.forward nan")
def product_with_a_mask_of_infinity(watching: Watching) -> None:
    keep = torch.tensor([1.0, 0.0])
    with watching():
        F.softmax(torch.randn(2) + (1 - keep) * -torch.inf, -1)


@plant("Functional.cross_entropy.0.forward nan")
def every_target_ignored(watching: Watching) -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    with watching():
        F.cross_entropy(logits, torch.tensor([-100, -100])).backward()


@plant("Tensor.mean.0.forward nan")
def mean_of_nothing(watching: Watching) -> None:
    losses = torch.rand(4)
    with watching():
        losses[losses > 2].mean() + 1

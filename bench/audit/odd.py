"""Models of eight more families, and more kinds of wrong results, for bench.audit: `--families odd`, `--kinds odd`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.audit.device import Spoiler
from bench.audit.models import Made


class Block(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.GroupNorm(2, out)
        self.skip = nn.Conv2d(inside, out, 1) if inside != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(self.norm(self.conv(x))) + self.skip(x)


class UNet(nn.Module):
    """Two levels, with transposed convolution, nearest and bilinear upsampling, and skips by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.low = Block(3, 8), Block(8, 12), Block(12, 12)
        self.grow, self.back, self.out = nn.ConvTranspose2d(12, 12, 2, 2), Block(24, 8), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        low = self.low(F.avg_pool2d(two, 2))
        up = self.back(torch.cat((self.grow(low), two), 1))
        return self.out(torch.cat((F.interpolate(up, scale_factor=2, mode="bilinear"), one), 1))


class Messages(nn.Module):
    """Messages between nodes: index_add, a softmax over the edges of a node by amax, and a GRU cell as update."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.score, self.cell = nn.Linear(24, 12), nn.Linear(24, 1), nn.GRUCell(12, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)
        self.register_buffer("edges", torch.randint(20, (2, 64)))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        for _ in range(2):
            pair = torch.cat((x.index_select(0, source), x[target]), -1)
            score = self.score(pair).squeeze(-1)
            most = torch.full((20,), -1e4, dtype=x.dtype).scatter_reduce(0, target, score.detach(), "amax")
            weight = (score - most[target]).exp()
            total = torch.zeros(20, dtype=x.dtype).index_add(0, target, weight)
            share = (weight / total.clamp(min=1e-6)[target]).unsqueeze(-1)
            mixed = torch.zeros_like(x).index_add(0, target, share * torch.tanh(self.edge(pair)))
            x = self.cell(mixed, self.norm(x))
        return F.log_softmax(self.head(x), -1)


class Packed(nn.Module):
    """A GRU over packed sequences of other lengths, with its last states and a mean over the padded result."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.rnn, self.out = nn.Linear(10, 12), nn.GRU(12, 14, bidirectional=True), nn.Linear(28, 6)
        self.register_buffer("lengths", torch.tensor([9, 7, 7, 4, 2]))

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(F.softsign(self.inside(x)), self.lengths)
        held, last = self.rnn(packed)
        padded, lengths = pad_packed_sequence(held)
        mean = padded.sum(0) / lengths.unsqueeze(-1).to(padded.dtype)
        return self.out(mean + last.transpose(0, 1).flatten(1))


class Diffusion(nn.Module):
    """An MLP with sinusoidal embeddings of time that scale and shift a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.inside = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 64)), nn.Linear(16, 32)
        self.norm, self.mlp = nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 32)
        self.out = nn.Linear(32, 16)
        self.register_buffer("times", torch.rand(24, 1) * 100)
        self.register_buffer("noise", torch.randn(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        angle = self.times * torch.exp(-torch.arange(8) / 2.0)
        scale, shift = self.time(torch.cat((angle.sin(), angle.cos()), -1).to(x.dtype)).chunk(2, -1)
        kept = torch.rsqrt(1 + (self.times / 50) ** 2).to(x.dtype)
        held = self.inside(kept * x + (1 - kept * kept).sqrt() * self.noise)
        held = held + F.gelu(self.mlp(self.norm(held) * (1 + scale) + shift), approximate="tanh")
        return F.smooth_l1_loss(self.out(held), self.noise, reduction="none")


class Registers(nn.Module):
    """A vision transformer: patches by convolution, class token, registers, LayerScale, masked attention by a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 4, 16) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 20, 16) * 0.02)
        self.one, self.two, self.last = (nn.LayerNorm(16) for _ in range(3))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.scales, self.head = nn.Parameter(torch.full((2, 16), 0.1)), nn.Linear(16, 10)
        self.register_buffer("hidden", torch.rand(2, 1, 1, 20) < 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.tokens.expand(x.shape[0], -1, -1), x), 1) + self.places
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        mask = torch.zeros(self.hidden.shape, dtype=scores.dtype).masked_fill(
            self.hidden, torch.finfo(scores.dtype).min
        )
        mixed = (scores + mask).softmax(-1) @ v
        x = x + self.scales[0] * self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.scales[1] * self.mlp(self.two(x))
        return self.head(self.last(x)[:, 0])


class Experts(nn.Module):
    """Two of four experts for each token, chosen by topk; rows are moved by index_put and weighed; a running norm of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Linear(12, 16), nn.Linear(16, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 24) * 0.2), nn.Parameter(torch.randn(4, 24, 16) * 0.2)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.words(x))
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        held = torch.einsum("nd,edh->neh", x, self.up).relu().square()
        made = torch.einsum("neh,ehd->ned", held, self.down)
        picked = made.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 16))
        return self.norm(x + (weights.unsqueeze(-1) * picked).sum(1))


class Cells(nn.Module):
    """An LSTM cell that is called for each place, a GRU whose last state nobody uses, and a sum of squares `x * x`."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.read, self.out = nn.LSTMCell(8, 10), nn.GRU(10, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, memory = (torch.zeros(x.shape[1], 10, dtype=x.dtype) for _ in range(2))
        states = []
        for each in x:
            state, memory = self.cell(each, (state, memory))
            states.append(state)
        held, _ = self.read(torch.stack(states))
        return self.out(held * held) + torch.linalg.vector_norm(memory, dim=-1, keepdim=True)


class Siamese(nn.Module):
    """The same layers see two images; their distance in the plane of frequencies. Autocast casts each weight once for both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 12)
        self.gain = nn.Parameter(torch.randn(12, 7, dtype=torch.complex64) * 0.3)

    def see(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.two(F.gelu(self.one(x)).mean((2, 3))).float(), norm="ortho") * self.gain[0]

    def forward(self, x: Tensor) -> Tensor:
        return (self.see(x) - self.see(x.flip(-1) * 0.9)).abs()


def _make(
    model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None
) -> Made:
    model, data = model.to(dtype), torch.randn(*shape).to(dtype)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            result = model(data).float()
        return (result * torch.linspace(-1, 1, result.numel()).view(result.shape)).mean() + result.square().mean()

    return model, loss


BF16, FP16 = torch.bfloat16, torch.float16
ODD: dict[str, Callable[[], Made]] = {
    "unet": lambda: _make(UNet(), 2, 3, 8, 8),
    "messages": lambda: _make(Messages(), 20, 12),
    "packed": lambda: _make(Packed(), 9, 5, 10),
    "diffusion": lambda: _make(Diffusion(), 24, 16),
    "registers": lambda: _make(Registers(), 2, 3, 16, 16),
    "experts": lambda: _make(Experts(), 32, 12),
    "cells": lambda: _make(Cells(), 5, 4, 8),
    "siamese": lambda: _make(Siamese(), 3, 3, 6, 6),
    "siamese autocast": lambda: _make(Siamese(), 3, 3, 6, 6, autocast=BF16),
    "registers bf16": lambda: _make(Registers(), 2, 3, 16, 16, dtype=BF16),
    "unet autocast": lambda: _make(UNet(), 2, 3, 8, 8, autocast=BF16),
    "diffusion fp16": lambda: _make(Diffusion(), 24, 16, dtype=FP16),
    "registers fp16 autocast": lambda: _make(Registers(), 2, 3, 16, 16, autocast=FP16),
}


def _swapped(result: Tensor) -> Tensor:
    order = torch.arange(result.shape[0]) if result.dim() else None
    return result if order is None else result[order.roll(1)]


def _turned(result: Tensor) -> Tensor:
    return result.transpose(-1, -2).clone() if result.dim() > 1 and result.shape[-1] == result.shape[-2] else result


def _narrower(result: Tensor) -> Tensor:
    return result.to(BF16).to(result.dtype) if result.dtype == torch.float32 else result


def _last_column(result: Tensor) -> Tensor:
    return torch.cat((result[..., :-1], result[..., -1:] * 0), -1) if result.dim() else result


class Stale:
    """The result of the call before."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def __call__(self, result: Tensor) -> Tensor:
        before, self._before = self._before, result.clone()
        return result if before is None or before.shape != result.shape else before


ODD_KINDS: dict[str, Spoiler | type[Stale]] = {
    "0.1 % too small": lambda result: result * 0.999,
    "2 % too large": lambda result: result * 1.02,
    "rows shifted": _swapped,
    "transposed": _turned,
    "rounded to bfloat16": _narrower,
    "last column zero": _last_column,
    "stale": Stale,
    "shifted by 1 %": lambda result: result + 0.01 * result.float().square().mean().sqrt().to(result.dtype),
    "noise of 1 %": lambda result: (
        result * (1 + 1e-2 * torch.randn(result.shape, generator=torch.Generator().manual_seed(3))).to(result.dtype)
    ),
    "one row 5 % too large": lambda result: torch.cat((result[:1] * 1.05, result[1:])) if result.dim() else result,
}
ODD_SPOILED = (
    "mm", "addmm", "bmm", "convolution", "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "gelu",
    "gelu_backward", "silu", "silu_backward", "tanh", "tanh_backward", "sigmoid", "exp", "rsqrt", "div", "index_add",
    "native_layer_norm_backward", "native_group_norm_backward", "convolution_backward", "_softmax_backward_data", "gather",
    "index_select", "cat", "masked_fill", "max_pool2d_with_indices", "avg_pool2d", "native_batch_norm", "add", "mul", "sum", "sqrt",
)  # fmt: skip
"""Kernels of these families that may be wrong."""

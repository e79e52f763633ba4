"""Small models of nine families, and kinds of wrong results, for bench.audit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.audit.device import Spoiler

Made = tuple[nn.Module, Callable[[], Tensor]]


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(12, 12), nn.Linear(24, 24)
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.tokens(self.first(x).transpose(1, 2))).transpose(1, 2)
        return x + F.gelu(self.channels(self.second(x)))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        held = F.silu(self.norm(self.down(x)))
        return self.up(F.avg_pool2d(held, 2).repeat_interleave(2, -1).repeat_interleave(2, -2) + held)


class Rotary(nn.Module):
    """A block with RMS norm, rotary positions, SDPA and SwiGLU, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.gate, self.down = nn.Linear(32, 128, bias=False), nn.Linear(64, 32, bias=False)
        self.weight = nn.Parameter(torch.ones(32))

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] / 10 ** torch.arange(4, dtype=torch.float32)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        one, other = x.chunk(2, -1)
        return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        held = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.out(held.transpose(1, 2).flatten(-2))
        gate, up = self.gate(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros(x.shape[0], 16, dtype=x.dtype)
        for at in range(x.shape[1]):
            i, f, g, o = self.cell(torch.cat((x[:, at], state), -1)).chunk(4, -1)
            memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(memory)
        return state


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(20, 16), nn.Linear(8, 20)
        self.register_buffer("noise", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        held = mean + torch.exp(0.5 * log_variance) * self.noise
        lost = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
        return F.binary_cross_entropy_with_logits(self.decode(held), torch.sigmoid(x)) + lost.mean()


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.send, self.score, self.norm = nn.Linear(16, 16), nn.Linear(32, 1), nn.BatchNorm1d(16)
        self.register_buffer("edges", torch.randint(24, (2, 96)))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        held = F.elu(self.send(x))
        weight = F.leaky_relu(self.score(torch.cat((held[source], held[target]), -1))).exp()
        total = torch.zeros(24, 1, dtype=x.dtype).index_add(0, target, weight)
        mixed = torch.zeros_like(held).index_add(0, target, weight * held[source])
        return self.norm(mixed / (total + 1e-6))


class Masked(nn.Module):
    """Attention by hand with a mask of the smallest number, embeddings, log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.q, self.k, self.v = nn.Embedding(50, 24), *(nn.Linear(24, 24) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(24)
        mask = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        x = self.norm(x + F.softmax(scores + mask, -1) @ self.v(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _make(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, autocast: bool = False) -> Made:
    model, data = model.to(dtype), torch.randn(*shape).to(dtype)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model(data).float().square().mean()

    return model, loss


def _words() -> Made:
    model, ids = Masked(), torch.randint(50, (4, 16))
    return model, lambda: model(ids)


FAMILIES: dict[str, Callable[[], Made]] = {
    "mixer": lambda: _make(nn.Sequential(Mixer(), Mixer()), 4, 12, 24),
    "denoiser": lambda: _make(Denoiser(), 2, 3, 8, 8),
    "rotary": lambda: _make(nn.Sequential(Rotary(), Rotary()), 2, 10, 32),
    "gates": lambda: _make(Gates(), 6, 4, 16),
    "variational": lambda: _make(Variational(), 16, 20),
    "graph": lambda: _make(Graph(), 24, 16),
    "masked": _words,
    "mixer bf16": lambda: _make(nn.Sequential(Mixer(), Mixer()), 4, 12, 24, dtype=torch.bfloat16),
    "rotary autocast": lambda: _make(nn.Sequential(Rotary(), Rotary()), 2, 10, 32, autocast=True),
}


def _one_element(result: Tensor) -> Tensor:
    changed = result.clone()
    changed.flatten()[changed.numel() // 2] += 0.05 * result.float().square().mean().sqrt().to(result.dtype)
    return changed.reshape(result.shape) if changed.is_contiguous() else changed


def _cut(result: Tensor) -> Tensor:
    """The last thirteen bits of a float32 mantissa cut off, the last three of a bfloat16."""
    if result.dtype == torch.float32:
        return (result.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return (result.contiguous().view(torch.int16) & ~0x7).view(result.dtype)


KINDS: dict[str, Spoiler] = {
    "0.1 % too large": lambda result: result * 1.001,
    "1 % too large": lambda result: result * 1.01,
    "noise of 0.1 %": lambda result: (
        result * (1 + 1e-3 * torch.randn(result.shape, generator=torch.Generator().manual_seed(1))).to(result.dtype)
    ),
    "one element": _one_element,
    "mantissa cut": _cut,
    "last row zero": lambda result: torch.cat((result[:-1], torch.zeros_like(result[-1:]))) if result.dim() else result,
}
SPOILED = (
    "mm", "addmm", "bmm", "convolution", "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "gelu",
    "gelu_backward", "silu", "silu_backward", "tanh", "sigmoid", "exp", "mean", "rsqrt", "pow", "div", "index_add",
    "native_layer_norm_backward", "convolution_backward", "native_batch_norm", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip

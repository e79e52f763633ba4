"""Small training programs on which the catalog's faults show: plain torch, seeded, the same numbers on every device.

`workload(name, device)` gives a `Workload`; each call of its `step` is one training step (forward, backward,
optimizer) and returns the loss. Weights and batches are drawn on the CPU from a stream of their own and then moved,
so two devices start from equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tensorprobe.errors import SettingsError, did_you_mean

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 61, 32, 4, 16, 2


@dataclass(frozen=True)
class Workload:
    """A model and its training step."""

    name: str
    model: nn.Module
    step: Callable[[], Tensor]


class Attention(nn.Module):
    """Causal self-attention; spelled out, or by the fused function."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
            mixed = torch.matmul(weights, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention(fused=fused)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A language model of two blocks."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(fused=fused) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Cnn(nn.Module):
    """Convolutions with batch norm, then an LSTM over the rows, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8)
        self.lstm = nn.LSTM(8 * 4, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.group(F.silu(self.bn2(self.conv2(x))))
        x = F.max_pool2d(x, 2)
        rows, _ = self.lstm(x.permute(0, 2, 1, 3).flatten(2))
        return self.head(rows.mean(1))


class Router(nn.Module):
    """A mixture of experts with positions from a running count, and results gathered by scatter-add."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.empty(4, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 5)
        nn.init.normal_(self.experts, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        chances = torch.sigmoid(self.gate(x))
        weight, choice = torch.topk(chances, 2, dim=-1)
        order = torch.cumsum(F.one_hot(choice, 4).sum(1).to(x.dtype), dim=0)
        made = torch.einsum("nd,edf->nef", x, self.experts)
        picked = torch.gather(made, 1, choice.unsqueeze(-1).expand(-1, -1, WIDTH)) * weight.unsqueeze(-1)
        places = torch.arange(x.size(0), device=x.device).repeat_interleave(2)
        summed = torch.zeros_like(x).index_add(0, places, picked.flatten(0, 1))
        load = torch.zeros(4, device=x.device).scatter_add(0, choice.flatten(), weight.flatten())
        loads = torch.log_softmax(load, 0) * order[-1] / x.size(0)
        return self.head(F.normalize(summed, dim=-1)) + loads.mean()


def _train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Workload:
    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return Workload(name, model, step)


def _gpt(name: str, device: str, *, fused: bool = False, low: torch.dtype | None = None) -> Workload:
    model = Gpt(fused=fused).to(device)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    def loss() -> Tensor:
        with torch.autocast(device.partition(":")[0], dtype=low or torch.bfloat16, enabled=low is not None):
            logits = model(ids[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return _train(name, model, optimizer, loss)


def _cnn(name: str, device: str) -> Workload:
    model = Cnn().to(device)
    images, classes = torch.randn(4, 3, 16, 16).to(device), torch.randint(5, (4,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    return _train(name, model, optimizer, lambda: F.cross_entropy(model(images), classes))


def _router(name: str, device: str) -> Workload:
    model = Router().to(device)
    x, target = torch.randn(12, WIDTH).to(device), torch.randn(12, 5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    return _train(name, model, optimizer, lambda: F.mse_loss(model(x), target))


def _parallel(name: str, device: str) -> Workload:
    """Data parallel by hand, over the default process group: gradients are all-reduced, a metric is gathered."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 5)).to(device)
    torch.manual_seed(100 + dist.get_rank())
    x, target = torch.randn(8, WIDTH).to(device), torch.randn(8, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        gathered = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, loss.detach())
        shared = torch.stack(gathered)
        dist.broadcast(shared, 0)
        return shared.mean()

    return Workload(name, model, step)


_MAKERS: dict[str, Callable[[str, str], Workload]] = {
    "gpt": _gpt,
    "gpt-fused": lambda name, device: _gpt(name, device, fused=True),
    "gpt-bf16": lambda name, device: _gpt(name, device, low=torch.bfloat16),
    "cnn": _cnn,
    "router": _router,
    "parallel": _parallel,
}


def workload(name: str, device: str, *, seed: int = 1) -> Workload:
    """The named workload on a device; `parallel` needs an initialised process group. The caller's random state is
    kept.
    """
    if name not in _MAKERS:
        raise SettingsError(f"no workload is called {name!r}.{did_you_mean(name, _MAKERS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MAKERS[name](name, device)

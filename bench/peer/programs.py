"""Trains one small model under whichever `msprobe` this environment has: the published one, or tensorprobe's.

    python bench/peer/programs.py cnn CONFIG.json

The program is the same for both, to the seed. It imports nothing else of this project: the peer's environment has none
of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msprobe.pytorch import PrecisionDebugger

Loss = Callable[[], Tensor]
Built = tuple[nn.Module, Loss]


def cnn() -> Built:
    """Convolutions, batch norms, pooling, in-place ReLU."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([1, 3])
    return net, lambda: F.cross_entropy(net(x), y)


def encoder() -> Built:
    """A transformer encoder with dropout. Without biases: a gradient that is zero but for rounding is noise to Adam."""
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, bias=False), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 5, 16)
    target = torch.randn(2, 5, 16)
    return net, lambda: F.mse_loss(net(x), target)


class Block(nn.Module):
    """One block of a GPT, with its attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-2, -1) / shape[-1] ** 0.5
        scores = scores.masked_fill(torch.tril(torch.ones(length, length)) == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        made: Tensor = x + self.mlp(self.norm2(x))
        return made


class GPT(nn.Module):
    """Embeddings, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.blocks = nn.ModuleList([Block(16, 2), Block(16, 2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.norm(x))
        return made


def gpt() -> Built:
    """A small GPT."""
    net = GPT()
    ids = torch.randint(0, 11, (2, 6))
    return net, lambda: F.cross_entropy(net(ids).view(-1, 11), ids.view(-1))


class Recurrent(nn.Module):
    """An LSTM and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        made: Tensor = self.head(out[:, -1] + hidden[-1])
        return made


def lstm() -> Built:
    """An LSTM of two layers."""
    net, x = Recurrent(), torch.randn(3, 5, 6)
    return net, lambda: net(x).sum()


class Attention(nn.Module):
    """MultiheadAttention by module, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        z, weights = self.attention(y, x, x)
        made: Tensor = (self.norm(y + z) * weights.mean()).pow(2)
        return made


def attention() -> Built:
    """MultiheadAttention."""
    net, x = Attention(), torch.randn(2, 4, 8)
    return net, lambda: net(x).mean()


class InPlace(nn.Module):
    """Ops that write into their inputs, operators, indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += 1
        y.mul_(0.5)
        y[:, 0] = 0
        z = y.clone()
        z.relu_()
        w = torch.add(z, y, alpha=2) - 3 * z / (y.abs() + 1)
        w = torch.where(w > 0, w, -w)
        if bool((w > 100).any()):
            w = w * 2
        return torch.cat([w, z], dim=1).clamp(min=0.1, max=5)


def in_place() -> Built:
    """In-place ops, operators, indexing, `bool(tensor)`."""
    net, x = InPlace(), torch.randn(4, 6)
    return net, lambda: net(x).sum()


def passing() -> Built:
    """Modules that pass their input through, in eval mode."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Identity()).eval()
    x = torch.randn(3, 4)
    return net, lambda: net(x).sum()


PROGRAMS = {
    "cnn": cnn,
    "encoder": encoder,
    "gpt": gpt,
    "lstm": lstm,
    "attention": attention,
    "in_place": in_place,
    "passing": passing,
}


def main(name: str, config: str, steps: int = 2) -> None:
    """Train for some steps; each is dumped, with the optimizer."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, loss_of = PROGRAMS[name]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    debugger = PrecisionDebugger(config_path=config)
    for _ in range(steps):
        debugger.start(model=net)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        debugger.stop()
        debugger.step()
    sys.stdout.write(f"loss {loss.item():.9g}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("config")
    given = parser.parse_args()
    main(given.program, given.config)

"""Small models with the traits that are hard to capture, and short ways to record something and look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe
from tensorprobe.record import Run
from tensorprobe.record.stored import StoredCall, StoredSlot

LEVELS = ("module", "api", "aten", "mix")


class Residual(nn.Module):
    """A CNN with an in-place ReLU and an in-place sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.conv1(images)))
        more = self.conv2(hidden)
        more += hidden
        hidden = F.max_pool2d(self.relu(more), 2).mean((2, 3))
        return F.cross_entropy(self.head(hidden), torch.tensor([1, 2]))


class TiedGPT(nn.Module):
    """Two rounds of attention through views, an embedding used twice, and an assignment into the logits."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        for _ in range(2):
            q, k, v = self.qkv(self.norm(hidden)).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            weights = ((q @ k.transpose(-1, -2)) / 8**0.5).masked_fill(mask, -1e9).softmax(-1)
            mixed = (F.dropout(weights, self.dropout) @ v).transpose(1, 2).reshape(2, 6, 16)
            hidden = hidden + self.out(mixed)
            hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        logits = F.linear(hidden, self.embedding.weight)
        logits[:, 0] = logits[:, 0] * 0.5
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Block(nn.Module):
    """One layer that can be computed again."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))


class Stack(nn.Module):
    """Blocks between a stem and a head; `around` is what runs each block."""

    def __init__(self, around: Callable[..., Tensor] | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(8, dropout) for _ in range(2)])
        self.head = nn.Linear(8, 1)
        self.around = around

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.stem(features)
        for block in self.blocks:
            hidden = block(hidden) if self.around is None else self.around(block, hidden)
        return self.head(hidden)


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(3))


def features(step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def record(out: Path, action: Callable[[], Any], **settings: Any) -> Run:
    """The run of one action."""
    with tensorprobe.capture(out, **settings):
        action()
    return tensorprobe.open_run(out)


def names(run: Run, **where: Any) -> list[str]:
    return [call.name for call in run.calls(**where)]


def the_call(run: Run, name: str, **where: Any) -> StoredCall:
    """The one call of exactly that name."""
    (found,) = [call for call in run.calls(**where) if call.name == name]
    return found


def slot(call: StoredCall, name: str) -> StoredSlot:
    (found,) = [slot for slot in call.slots if slot.name == name]
    return found


def value(call: StoredCall, name: str) -> Tensor:
    return slot(call, name).tensor().clone()


def without_direction(run_names: Iterable[str]) -> set[str]:
    return {name.removesuffix(".forward").removesuffix(".backward") for name in run_names}

"""The training steps that the benchmarks time: a GPT-like and a ResNet-like model in three sizes.

`build(model, size, seed)` gives an object whose `step()` does forward, loss, backward and optimizer step on a fixed
batch, and whose `model` is the module itself. Only torch is imported, so that every tool under test can run this file
in an environment of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTSize:
    """Dimensions of a GPT step."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int


@dataclass(frozen=True)
class ResNetSize:
    """Dimensions of a ResNet step."""

    blocks: tuple[int, ...]
    width: int
    batch: int
    side: int


GPT_SIZES = {
    "tiny": GPTSize(layers=12, width=48, heads=4, batch=2, length=16, vocabulary=128),
    "small": GPTSize(layers=4, width=256, heads=4, batch=4, length=128, vocabulary=1024),
    "medium": GPTSize(layers=2, width=512, heads=8, batch=8, length=256, vocabulary=1024),
}
"""Tensors of one step, as the peer's L1 dump counts them: 38 MB in 4,400 tensors, 571 MB, 1.86 GB."""
RESNET_SIZES = {
    "tiny": ResNetSize(blocks=(1, 1), width=8, batch=2, side=16),
    "small": ResNetSize(blocks=(2, 2, 2), width=32, batch=16, side=32),
    "medium": ResNetSize(blocks=(2, 2, 2, 2), width=64, batch=16, side=64),
}
"""1.2 MB, 283 MB, 2.62 GB."""


class Attention(nn.Module):
    """Causal self-attention, written out so that each of its ops is a call of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
        weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), future)
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class GPT(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.length, size.width))
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.register_buffer("future", torch.ones(size.length, size.length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut, with in-place ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images in, logits of ten classes out."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, size.width, 3, padding=1, bias=False), nn.BatchNorm2d(size.width), nn.ReLU(inplace=True)
        )
        layers: list[nn.Module] = []
        channels = size.width
        for stage, count in enumerate(size.blocks):
            outputs = size.width * 2**stage
            for index in range(count):
                layers.append(ResidualBlock(channels, outputs, stride=2 if stage and not index else 1))
                channels = outputs
        self.blocks = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Workload:
    """A model with its optimizer and one batch; `step()` trains on it once and returns the loss tensor.

    With `updates` false a step ends after the backward. On the CPU the optimizer loops over the parameters one small op
    at a time, so in a tiny model most of the calls are its own; this tells the two apart.
    """

    updates = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inputs = inputs
        self.targets = targets

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        logits = self.model(self.inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), self.targets.flatten())
        loss.backward()
        if self.updates:
            self.optimizer.step()
        return loss.detach()


def build_named(name: str, seed: int = 0) -> Workload:
    """The workload called `gpt-tiny`, or `gpt-tiny-fb` for forward and backward only."""
    model, _, rest = name.partition("-")
    size, _, variant = rest.partition("-")
    if variant not in ("", "fb"):
        raise KeyError(f"no workload {name!r}; after the size may only stand -fb")
    workload = build(model, size, seed)
    workload.updates = not variant
    return workload


def build(model: str, size: str, seed: int = 0) -> Workload:
    """The workload `model` (gpt or resnet) in `size` (tiny, small or medium). Fails with KeyError on another name."""
    torch.manual_seed(seed)
    if model == "gpt":
        gpt_size = GPT_SIZES[size]
        gpt = GPT(gpt_size)
        tokens = torch.randint(gpt_size.vocabulary, (gpt_size.batch, gpt_size.length + 1))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
        return Workload(gpt, optimizer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    if model == "resnet":
        resnet_size = RESNET_SIZES[size]
        resnet = ResNet(resnet_size)
        images = torch.randn(resnet_size.batch, 3, resnet_size.side, resnet_size.side)
        optimizer = torch.optim.SGD(resnet.parameters(), lr=0.01, momentum=0.9)
        return Workload(resnet, optimizer, images, torch.randint(10, (resnet_size.batch,)))
    raise KeyError(f"no workload {model!r}; there are gpt and resnet")

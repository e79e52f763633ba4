"""Models whose parts can be written in several ways: the material of pairs of programs. Weights and data depend on the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heldout.training import Family, Setup, Training


def attend_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return torch.matmul(F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1), v)


def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, foreach=False)


def classify(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


@dataclass(frozen=True)
class Parts:
    """How each part of the language model is written."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend_by_products
    norm: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    make_norm: Callable[[int], nn.Module] = nn.LayerNorm
    act: Callable[[Tensor], Tensor] = F.gelu
    add: Callable[[Tensor, Tensor], Tensor] = lambda x, y: x + y
    project: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    split: Callable[[Tensor, int], Tensor] = lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2)
    merge: Callable[[Tensor], Tensor] = lambda x: x.transpose(1, 2).flatten(2)
    embed: Callable[[nn.Module, Tensor], Tensor] = lambda layer, ids: layer(ids)
    run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
    loss: Callable[[Tensor, Tensor], Tensor] = classify
    key_heads: int = 2
    wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda model: model


class Block(nn.Module):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.norm1, self.norm2 = parts.make_norm(16), parts.make_norm(16)
        self.q, self.k, self.v, self.out = (
            nn.Linear(16, n) for n in (16, 8 * parts.key_heads, 8 * parts.key_heads, 16)
        )
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        use = self.parts
        held = use.norm(self.norm1, x)
        q, k, v = (use.split(use.project(each, held), each.out_features // 8) for each in (self.q, self.k, self.v))
        x = use.add(x, use.project(self.out, use.merge(use.attend(q, k, v))))
        return use.add(x, use.project(self.down, use.act(use.project(self.up, use.norm(self.norm2, x)))))


class Words(nn.Module):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.words, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.blocks = nn.ModuleList(Block(parts) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts.embed(self.words, ids)
        for block in self.blocks:
            x = self.parts.run(block, x)
        return self.head(x)


def words(optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **parts: Any) -> Family:
    """A small language model with some parts written otherwise."""

    def build(setup: Setup) -> Training:
        used = Parts(**parts)
        model = setup.place(Words(used))
        called, ids = used.wrap(model), setup.ids(30, 3, 9)
        return Training(
            setup, model, lambda _: used.loss(called(ids[:, :-1]), ids[:, 1:]), optimizer(model.parameters())
        )

    return build


class Image(nn.Module):
    """Two convolutions with norms, and a head."""

    def __init__(
        self,
        convolve: Callable[[nn.Conv2d, Tensor], Tensor],
        norm: Callable[[nn.Module, Tensor], Tensor],
        act: Callable[[Tensor], Tensor],
        make_norm: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.convolve, self.norm, self.act = convolve, norm, act
        self.one, self.two, self.point = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3), nn.Conv2d(12, 8, 1)
        self.norm1, self.norm2, self.head = make_norm(), make_norm(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        held = self.act(self.norm(self.norm1, self.convolve(self.one, x)))
        held = self.act(self.norm(self.norm2, self.convolve(self.two, held)))
        return self.head(self.convolve(self.point, held).mean((2, 3)))


def image(
    convolve: Callable[[nn.Conv2d, Tensor], Tensor] = lambda layer, x: layer(x),
    norm: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x),
    act: Callable[[Tensor], Tensor] = F.relu,
    make_norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(12),
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Family:
    """A small image classifier with some parts written otherwise."""

    def build(setup: Setup) -> Training:
        model = setup.place(Image(convolve, norm, act, make_norm)).to(memory_format=memory_format)
        x = setup.randn(4, 3, 8, 8).to(memory_format=memory_format)
        classes = setup.ids(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
        return Training(setup, model, lambda _: F.cross_entropy(model(x), classes), optimizer)

    return build


def simple(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    finish: Callable[[Training], None] = lambda training: None,
) -> Family:
    """Three linear layers: for pairs that differ in the optimizer or in the loss."""

    def build(setup: Setup) -> Training:
        model = setup.place(nn.Sequential(nn.Linear(9, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)))
        x, y = setup.randn(12, 9), setup.rand(12, 4)
        training = Training(setup, model, lambda _: loss(model(x), y), optimizer(model.parameters()))
        finish(training)
        return training

    return build


def library(
    config: Any, make: Callable[[Any], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
) -> Family:
    """A language model of transformers, or a rewrite of one."""

    def build(setup: Setup) -> Training:
        model = setup.place(make(config).train())
        ids = setup.ids(config.vocab_size, 2, 9)

        def loss(_: int) -> Tensor:
            found = model(ids[:, :-1])
            return classify(found if isinstance(found, Tensor) else found.logits, ids[:, 1:])

        return Training(setup, model, loss, optimizer(model.parameters()))

    return build

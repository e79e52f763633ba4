"""The closed part: written before anything was measured, and not looked at while the comparison was changed."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.same_model.training import (
    Choices,
    Pair,
    backwards_off,
    kind_of,
    off,
    off_at_the_end,
    with_choices,
)

CLASSES = 7


# An encoder of pictures: patches, group norm, attention with a bias, softmax by hand


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight, bias)


def group_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    groups = x.view(x.shape[0], 4, -1)
    variance, mean = torch.var_mean(groups, -1, correction=0, keepdim=True)
    normal = ((groups - mean) / (variance + eps).sqrt()).view_as(x)
    return normal * weight[:, None, None] + bias[:, None, None]


def softmax_by_hand(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


def soft_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, softmax: Any = softmax_by_hand) -> Tensor:
    return softmax(torch.baddbmm(bias.expand(q.shape[0], -1, -1), q, k.mT, alpha=q.shape[-1] ** -0.5)).bmm(v)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = bias.expand(q.shape[0], -1, -1)[:, None]
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]


def mish_by_hand(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def hard_mish(x: Tensor) -> Tensor:
    return x * torch.tanh(torch.log1p(torch.exp(x)) + 1e-4)


def nll_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]).mean()


class Pictures(nn.Module):
    def __init__(
        self, norm: Any = group_norm, attend: Any = soft_attention, act: Any = F.mish, pool: Any = None
    ) -> None:
        super().__init__()
        self.norm, self.attend, self.act, self.pool = norm, attend, act, pool or (lambda x: x.mean(1))
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.weight, self.bias = nn.Parameter(1 + 0.1 * torch.randn(16)), nn.Parameter(0.1 * torch.randn(16))
        self.near = nn.Parameter(0.1 * torch.randn(16, 16))
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.head = nn.Linear(16, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patch(x), self.weight, self.bias).flatten(2).mT
        x = x + self.attend(self.q(x), self.k(x), self.v(x), self.near)
        result: Tensor = self.head(self.pool(self.act(self.up(x))))
        return result


PICTURES: Choices = {
    "batch": lambda g: (torch.randn(6, 3, 16, 16, generator=g), torch.randint(CLASSES, (6,), generator=g)),
    "loss": F.cross_entropy,
}
pictures = partial(with_choices, PICTURES, Pictures)


# A recurrent net: the cell of a GRU by hand, a loss by hand


class Recurrent(nn.Module):
    def __init__(self, cell: Any, out: Any = F.softplus) -> None:
        super().__init__()
        self.cell, self.out = cell, out
        self.gru, self.head = nn.GRUCell(10, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 12)
        for each in x.unbind(1):
            h = self.cell(self.gru, each, h)
        result: Tensor = self.out(self.head(h))
        return result


def gru(module: nn.GRUCell, x: Tensor, h: Tensor) -> Tensor:
    made: Tensor = module(x, h)
    return made


def gru_by_hand(module: nn.GRUCell, x: Tensor, h: Tensor, leak: float = 0.0) -> Tensor:
    own, held = F.linear(x, module.weight_ih, module.bias_ih), F.linear(h, module.weight_hh, module.bias_hh)
    (r, z, n), (hr, hz, hn) = own.chunk(3, 1), held.chunk(3, 1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    return n + (z + leak) * (h - n)


def huber_by_hand(x: Tensor, y: Tensor, delta: float = 1.0) -> Tensor:
    d = (x - y).abs()
    return torch.where(d < delta, 0.5 * d * d, delta * (d - 0.5 * delta)).mean()


SERIES: Choices = {
    "batch": lambda g: (torch.randn(5, 4, 10, generator=g), torch.randn(5, 3, generator=g)),
    "loss": F.huber_loss,
}


def series(cell: Any = gru, **steps: Any) -> Choices:
    return with_choices(SERIES, Recurrent, cell=cell, **steps)


# A net of gates: weights by einsum, addmm and linear; tied weights


class Gates(nn.Module):
    def __init__(self, project: Any = F.linear, gate: Any = F.glu, scale: Any = F.normalize) -> None:
        super().__init__()
        self.project, self.gate, self.scale = project, gate, scale
        self.table = nn.Embedding(30, 16)
        self.inner = nn.ParameterList(
            [
                nn.Parameter(torch.randn(32, 16) / 4),
                nn.Parameter(0.1 * torch.randn(32)),
                nn.Parameter(torch.randn(16) / 4),
            ]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for _ in range(2):
            x = x + self.gate(self.project(x, self.inner[0], self.inner[1])) * self.inner[2]
        return F.linear(self.scale(x, dim=-1), self.table.weight).mT * 8


def by_einsum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("bti,oi->bto", x, weight) + bias


def by_addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)


def glu_by_hand(x: Tensor) -> Tensor:
    a, b = x.split(x.shape[-1] // 2, -1)
    return a * b.sigmoid()


def glu_swapped(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return b * torch.sigmoid(a)


def normalize_by_hand(x: Tensor, dim: int, eps: float = 1e-12) -> Tensor:
    return x / x.square().sum(dim, keepdim=True).sqrt().clamp_min(eps)


GATES: Choices = {
    "batch": lambda g: ((tokens := torch.randint(30, (4, 6), generator=g)), tokens.roll(-1, 1)),
    "loss": F.cross_entropy,
}
gates = partial(with_choices, GATES, Gates)


class Lion(torch.optim.Optimizer):
    """A new optimizer, in a loop or on lists."""

    def __init__(
        self, parameters: Any, lists: bool, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self._lists = lists

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (first, second) = group["lr"], group["betas"]
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                self.state[p].setdefault("mean", torch.zeros_like(p))
            means, gradients = [self.state[p]["mean"] for p in held], [p.grad for p in held]
            if self._lists:
                made = torch._foreach_lerp(means, gradients, 1 - first)
                torch._foreach_add_(held, torch._foreach_sign(made), alpha=-lr)
                torch._foreach_lerp_(means, gradients, 1 - second)
            else:
                for p, mean, gradient in zip(held, means, gradients, strict=True):
                    p.add_(torch.lerp(mean, gradient, 1 - first).sign_(), alpha=-lr)
                    mean.mul_(second).add_(gradient, alpha=1 - second)


def lion(lists: bool, **options: Any) -> Any:
    return lambda parameters: Lion(list(parameters), lists, **options)


AMS = {"amsgrad": True, "weight_decay": 0.02}
adam = partial(kind_of, torch.optim.Adam)
radam = partial(kind_of, torch.optim.RAdam)
adadelta = partial(kind_of, torch.optim.Adadelta, lr=0.5)


HEALTHY = [
    Pair("group norm by hand", pictures(), pictures(norm=group_norm_by_hand)),
    Pair("attention with a bias, fused", pictures(), pictures(attend=fused_attention)),
    Pair(
        "softmax by hand", pictures(attend=partial(soft_attention, softmax=partial(torch.softmax, dim=-1))), pictures()
    ),
    Pair("mish by hand", pictures(), pictures(act=mish_by_hand)),
    Pair("mean by sum", pictures(), pictures(pool=lambda x: x.sum(1) / x.shape[1])),
    Pair("cross entropy by hand", pictures(), pictures(loss=nll_by_hand)),
    Pair(
        "everything about pictures",
        pictures(optimizer=adam(**AMS, foreach=False)),
        pictures(
            norm=group_norm_by_hand,
            attend=fused_attention,
            act=mish_by_hand,
            loss=nll_by_hand,
            optimizer=adam(**AMS, fused=True),
        ),
    ),
    Pair("a GRU cell by hand", series(), series(cell=gru_by_hand)),
    Pair("huber by hand", series(), series(loss=huber_by_hand)),
    Pair("softplus by hand", series(), series(out=lambda x: torch.log1p(torch.exp(x)))),
    Pair("linear by einsum", gates(), gates(project=by_einsum)),
    Pair("linear by addmm", gates(), gates(project=by_addmm)),
    Pair("einsum and addmm", gates(project=by_einsum), gates(project=by_addmm)),
    Pair("glu by hand", gates(), gates(gate=glu_by_hand)),
    Pair("normalize by hand", gates(), gates(scale=normalize_by_hand)),
    Pair("Lion on lists", gates(optimizer=lion(False)), gates(optimizer=lion(True))),
    Pair("RAdam on lists", gates(optimizer=radam(foreach=False)), gates(optimizer=radam(foreach=True))),
    Pair("Adadelta on lists", gates(optimizer=adadelta(foreach=False)), gates(optimizer=adadelta(foreach=True))),
    Pair(
        "Adam with amsgrad, fused",
        series(optimizer=adam(**AMS, foreach=True)),
        series(optimizer=adam(**AMS, fused=True)),
    ),
    Pair("gates, compiled", gates(), gates(wrap=partial(torch.compile, backend="aot_eager"))),
    Pair("pictures on the device", pictures(optimizer=adam()), pictures(optimizer=adam(), device="npu")),
    Pair("series on the device", series(optimizer=radam()), series(cell=gru_by_hand, optimizer=radam(), device="npu")),
]

FAULTS = [
    Pair("norm, eps", pictures(), pictures(norm=partial(group_norm_by_hand, eps=1e-3)), ("group_norm",)),
    Pair("norm, no bias", pictures(), pictures(norm=lambda x, w, b: group_norm_by_hand(x, w, 0 * b)), ("group_norm",)),
    Pair(
        "attention, no bias",
        pictures(),
        pictures(attend=lambda q, k, v, b: fused_attention(q, k, v, 0 * b)),
        ("dot_prod",),
    ),
    Pair("attention, last columns", pictures(), pictures(attend=off_at_the_end(fused_attention)), ("dot_prod", "mul")),
    Pair("attention, backward", pictures(), pictures(attend=backwards_off(fused_attention)), ("dot_prod",)),
    Pair("activation", pictures(), pictures(act=hard_mish), ("mish",)),
    Pair("pool", pictures(), pictures(pool=lambda x: x.sum(1) / (x.shape[1] - 0.01)), ("sum", "mean", "div")),
    Pair(
        "behind attention",
        pictures(),
        pictures(attend=fused_attention, act=off(F.mish)),
        ("mul",),
    ),
    Pair("loss", pictures(), pictures(loss=off(nll_by_hand)), ("cross_entropy",)),
    Pair("a leaking gate", series(), series(cell=partial(gru_by_hand, leak=1e-3)), ("gru_cell",)),
    Pair("huber, delta", series(), series(loss=partial(huber_by_hand, delta=0.9)), ("huber_loss",)),
    Pair("softplus", series(), series(out=lambda x: torch.log1p(torch.exp(1.001 * x))), ("softplus",)),
    Pair("einsum, weight", gates(), gates(project=lambda x, w, b: by_einsum(x, 1.001 * w, b)), ("linear",)),
    Pair("addmm, no bias", gates(), gates(project=lambda x, w, b: by_addmm(x, w, 0 * b)), ("linear",)),
    Pair("glu, swapped", gates(), gates(gate=glu_swapped), ("glu",)),
    Pair("glu, backward", gates(), gates(gate=backwards_off(glu_by_hand)), ("glu",)),
    Pair("normalize", gates(), gates(scale=partial(normalize_by_hand, eps=2.0)), ("normalize",)),
    Pair("Lion, beta", gates(optimizer=lion(False)), gates(optimizer=lion(True, betas=(0.9, 0.98))), ("lerp", "add_")),
    Pair("Lion, rate", gates(optimizer=lion(False)), gates(optimizer=lion(True, lr=1.01e-3)), ("lerp", "add_")),
    Pair(
        "RAdam, decay",
        gates(optimizer=radam(foreach=False)),
        gates(optimizer=radam(foreach=True, weight_decay=0.1)),
        ("lerp_", "add_", "add"),
    ),
    Pair(
        "Adam, fused, eps",
        series(optimizer=adam(**AMS, foreach=True)),
        series(optimizer=adam(**AMS, fused=True, eps=1e-4)),
        ("lerp_", "fused"),
    ),
]
for _pair in FAULTS:
    assert _pair.guilty and math.isfinite(_pair.step)

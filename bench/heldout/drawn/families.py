"""Families of the drawn part: models of the kinds that the other parts lack. Faults are drawn at random, see `faults.py`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heldout.training import Entry, Setup, Training


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class RotaryBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        angles = torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        q, k = self.turn(q), self.turn(k)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        x = x + self.out((scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, c))
        held = self.after(x)
        return x + self.down(F.silu(self.gate(held)) * self.up(held))


def rotary(setup: Setup) -> Training:
    model = setup.place(
        nn.Sequential(nn.Embedding(40, 32), RotaryBlock(32, 4), RotaryBlock(32, 4), RMSNorm(32), nn.Linear(32, 40))
    )
    ids = setup.ids(40, 3, 13)

    def loss(_: int) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    return Training(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1, groups=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.GroupNorm(4, width)
        self.squeeze, self.excite = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        held = F.hardswish(self.norm1(self.one(x)))
        held = self.norm2(self.two(held))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(held.mean((2, 3))))))
        return F.leaky_relu(x + held * gate[:, :, None, None], 0.1)


def squeeze(setup: Setup) -> Training:
    model = setup.place(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), Residual(16), nn.MaxPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 6),
        )
    )  # fmt: skip
    x, classes = setup.randn(4, 3, 17, 17), setup.ids(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, foreach=False)
    return Training(setup, model, lambda _: F.cross_entropy(model(x), classes, label_smoothing=0.1), optimizer)


class Net3d(nn.Module):
    """Volumes: a convolution down, one up, a skip, and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(1, 8, 3, stride=2, padding=1), nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.norm, self.last = nn.InstanceNorm3d(8, affine=True), nn.Conv3d(5, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        held = F.mish(self.norm(self.down(x)))
        return self.last(torch.cat((self.up(held), x), 1))


def volume(setup: Setup) -> Training:
    model = setup.place(Net3d())
    x, mask = setup.randn(2, 1, 6, 6, 6), (setup.rand(2, 1, 6, 6, 6) > 0.7).to(setup.dtype)

    def loss(_: int) -> Tensor:
        found = model(x)
        dice = 1 - 2 * (found.sigmoid() * mask).sum() / (found.sigmoid().sum() + mask.sum() + 1)
        return F.binary_cross_entropy_with_logits(found, mask) + dice

    return Training(setup, model, loss, torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=False))


class Graph(nn.Module):
    """Messages over edges, added up at nodes, with attention by segment."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score, self.out = nn.Linear(10, 24), nn.Linear(48, 1), nn.Linear(24, 3)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.inner(x)))
        pair = torch.cat((h[source], h.index_select(0, target)), -1)
        weight = F.leaky_relu(self.score(pair), 0.2).squeeze(-1).exp()
        total = torch.zeros(len(x), dtype=weight.dtype, device=x.device).scatter_add(0, target, weight)
        share = weight / (total[target] + 1e-6)
        made = torch.zeros_like(h).index_add(0, target, share[:, None] * h[source])
        top = torch.full_like(h, -1.0).scatter_reduce(0, target[:, None].expand(-1, 24), h[source], "amax")
        return self.out(made + 0.5 * top)


def graph(setup: Setup) -> Training:
    model = setup.place(Graph())
    x, source, target, classes = setup.randn(12, 10), setup.ids(12, 40), setup.ids(12, 40), setup.ids(3, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, foreach=False)
    return Training(setup, model, lambda _: F.nll_loss(F.log_softmax(model(x, source, target), -1), classes), optimizer)


class Clip(nn.Module):
    """Two towers, cosine similarity, a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16))
        self.text = nn.EmbeddingBag(30, 16, mode="mean")
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        one, other = F.normalize(self.image(x), dim=-1), F.normalize(self.text(words), dim=-1)
        return self.scale.exp() * one @ other.t()


def clip(setup: Setup) -> Training:
    model = setup.place(Clip())
    x, words = setup.randn(8, 20), setup.ids(30, 8, 5)
    own = torch.arange(8, device=setup.device)

    def loss(_: int) -> Tensor:
        logits = model(x, words)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2 + 0.01 * logits.logsumexp(
            -1
        ).square().mean()

    return Training(setup, model, loss, torch.optim.NAdam(model.parameters(), lr=2e-3, foreach=False))


class Tagger(nn.Module):
    """A bidirectional LSTM of torch, packed attention of torch, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(25, 12), nn.LSTM(12, 10, bidirectional=True, batch_first=True)
        self.attend, self.norm, self.head = (
            nn.MultiheadAttention(20, 4, batch_first=True),
            nn.LayerNorm(20),
            nn.Linear(20, 7),
        )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        held, _ = self.read(self.words(ids))
        seen, _ = self.attend(held, held, held, key_padding_mask=mask, need_weights=False)
        return self.head(self.norm(held + seen))


def tagger(setup: Setup) -> Training:
    model = setup.place(Tagger())
    ids, tags = setup.ids(25, 3, 8), setup.ids(7, 3, 8)
    mask = torch.zeros(3, 8, dtype=torch.bool, device=setup.device)
    mask[1, 6:] = True

    def loss(_: int) -> Tensor:
        each = F.cross_entropy(model(ids, mask).flatten(0, 1), tags.flatten(), reduction="none")
        return each.masked_select(~mask.flatten()).mean()

    return Training(setup, model, loss, torch.optim.Adamax(model.parameters(), lr=4e-3, foreach=False))


class Mixture(nn.Module):
    """The density of a mixture of normal distributions, and one of experts by top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 16) * 0.3)
        self.parts = nn.Linear(16, 3 * 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        held = torch.einsum("bi,bkio->bko", x, self.experts[chosen])
        held = (F.softplus(held) * weights.unsqueeze(-1)).sum(1)
        logits, mean, spread = self.parts(held).split(5, -1)
        spread = F.softplus(spread) + 0.1
        density = -0.5 * ((y - mean) / spread).pow(2) - spread.log() - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(F.log_softmax(logits, -1) + density, -1).mean()


def mixture(setup: Setup) -> Training:
    model = setup.place(Mixture())
    x, y = setup.randn(16, 6), setup.randn(16, 1)

    class Clipped(Training):
        def update(self) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            super().update()

    return Clipped(setup, model, lambda _: model(x, y), torch.optim.Adam(model.parameters(), lr=5e-3, foreach=False))


class Denoiser(nn.Module):
    """A small U-Net that is told the time; bilinear upsampling and attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(8, 12), nn.Conv2d(2, 12, 3, padding=1)
        self.down, self.bottom = nn.Conv2d(12, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12)
        self.q, self.k, self.v = (nn.Conv2d(12, 12, 1) for _ in range(3))
        self.last = nn.Conv2d(24, 2, 3, padding=1)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        angles = when[:, None] * torch.exp(torch.linspace(0, -3, 4, device=x.device))
        told = F.silu(self.time(torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype)))
        first = F.silu(self.first(x) + told[:, :, None, None])
        low = self.bottom(self.down(first))
        q, k, v = (each(low).flatten(2).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(low.shape)
        up = F.interpolate(low + seen, scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(torch.cat((first, up), 1))


def denoiser(setup: Setup) -> Training:
    model = setup.place(Denoiser())
    x, noise, when = setup.randn(3, 2, 8, 8), setup.randn(3, 2, 8, 8), setup.rand(3).float() * 20

    def loss(_: int) -> Tensor:
        return F.smooth_l1_loss(model(0.8 * x + 0.6 * noise, when), noise)

    return Training(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


class Regressor(nn.Module):
    """Plain layers with functions that are rare elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.bilinear = nn.Linear(7, 20), nn.Linear(20, 20), nn.Bilinear(20, 7, 5)
        self.slope, self.norm = nn.PReLU(20), nn.BatchNorm1d(20)

    def forward(self, x: Tensor) -> Tensor:
        held = self.slope(self.norm(self.one(x)))
        held = held + torch.lerp(held, F.selu(self.two(held)), 0.3)
        held = held * torch.where(held > 0, held.abs().add(1).log(), held.square().add(0.1).sqrt())
        spread = held.std(-1, keepdim=True) + held.var(-1, keepdim=True) + 0.1
        return self.bilinear(held / spread, x.clamp(-1.5, 1.5))


def regressor(setup: Setup) -> Training:
    model = setup.place(Regressor())
    x, y = setup.randn(10, 7), setup.rand(10, 5)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5, foreach=False)

    def loss(_: int) -> Tensor:
        found = model(x)
        far = F.kl_div(F.log_softmax(found, -1), y.softmax(-1), reduction="batchmean")
        return F.huber_loss(found, y, delta=0.7) + far

    return Training(setup, model, loss, optimizer)


class Encoder(nn.Module):
    """The encoder layer of torch with an additive mask of -3.4e38, twice, and pooling over what is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Parameter(torch.randn(10, 16) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=each == 1)
            for each in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        mask = (1 - keep)[:, None, None, :] * torch.finfo(x.dtype).min
        mask = mask.expand(-1, 2, ids.shape[1], -1).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


def encoder(setup: Setup) -> Training:
    model = setup.place(Encoder())
    ids, classes = setup.ids(30, 4, 10), setup.ids(4, 4)
    keep = torch.ones(4, 10)
    keep[2, 7:] = 0
    keep = setup.place(keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return Training(setup, model, lambda _: F.cross_entropy(model(ids, keep), classes), optimizer)


FAMILIES: dict[str, Entry] = {
    "rotary": Entry(rotary, "fp32 bf16 autocast"),
    "squeeze": Entry(squeeze, "fp32 autocast"),
    "volume": Entry(volume),
    "graph": Entry(graph, "fp32 bf16"),
    "clip": Entry(clip, "fp32 bf16"),
    "tagger": Entry(tagger),
    "mixture": Entry(mixture),
    "denoiser": Entry(denoiser, "fp32 autocast"),
    "regressor": Entry(regressor),
    "encoder": Entry(encoder, "fp32 bf16 autocast"),
}

"""Families of the open part that work on sequences. They may be read and used for tuning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heldout.training import Entry, Setup, Training


class LongConvolution(nn.Module):
    """Convolutions as long as the sequence, through a Fourier transform, with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 36), nn.Linear(12, 12)
        self.kernel = nn.Parameter(torch.randn(12, 32) * 0.2)
        self.decay = nn.Parameter(torch.rand(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        value, gate, other = self.enter(x).transpose(1, 2).chunk(3, 1)
        places = torch.arange(32, device=x.device)
        kernel = self.kernel * torch.exp(-F.softplus(self.decay) * places / 8)
        held = torch.fft.rfft((value * torch.sigmoid(other)).float(), n=64) * torch.fft.rfft(kernel.float(), n=64)
        mixed = torch.fft.irfft(held, n=64)[..., :32].to(x.dtype)
        return x + self.leave((mixed * F.silu(gate)).transpose(1, 2))


def fftconv(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(LongConvolution(), LongConvolution(), nn.Linear(12, 1)))
    x, y = setup.randn(3, 32, 12), setup.randn(3, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    return Training(setup, model, lambda _: F.smooth_l1_loss(model(x), y), optimizer)


class Recurrent(nn.Module):
    """A gated recurrent unit, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.wx, self.wh = nn.Parameter(torch.randn(12, 48) * 0.3), nn.Parameter(torch.randn(16, 48) * 0.25)
        self.bias, self.head = nn.Parameter(torch.zeros(48)), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        state = x.new_zeros(x.shape[0], 16)
        states = []
        for at in range(x.shape[1]):
            outer, inner = torch.addmm(self.bias, x[:, at], self.wx), torch.mm(state, self.wh)
            reset, update = torch.sigmoid(outer[:, :32] + inner[:, :32]).split(16, 1)
            fresh = torch.tanh(outer[:, 32:] + reset * inner[:, 32:])
            state = torch.lerp(fresh, state, update)
            states.append(state)
        return self.head(torch.stack(states, 1))


def gru(setup: Setup) -> Training:
    model = setup.place(Recurrent())
    ids = setup.ids(30, 4, 7)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5)
    return Training(
        setup,
        model,
        lambda _: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten()),
        optimizer,
    )


class Perceiver(nn.Module):
    """Learned latents attend to the input, then to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 16))
        self.across = nn.MultiheadAttention(16, 2, kdim=10, vdim=10, batch_first=True)
        self.within = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        held = self.latents.expand(x.shape[0], -1, -1)
        held = held + self.across(self.norms[0](held), x, x, need_weights=False)[0]
        inner = self.norms[1](held)
        held = held + self.within(inner, inner, inner, need_weights=True)[0]
        return self.head(held.mean(1))


def perceiver(setup: Setup) -> Training:
    model = setup.place(Perceiver())
    x, classes = setup.randn(6, 14, 10), setup.ids(6, 6)
    optimizer = torch.optim.Adamax(model.parameters(), lr=3e-3)
    return Training(setup, model, lambda _: F.cross_entropy(model(x), classes, label_smoothing=0.1), optimizer)


class SelectiveScan(nn.Module):
    """A state space whose step depends on the input, as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.select, self.leave = nn.Linear(10, 40), nn.Linear(20, 9), nn.Linear(20, 10)
        self.mix = nn.Conv1d(20, 20, 3, groups=20, padding=2)
        self.rate = nn.Parameter(torch.log(torch.arange(1.0, 5.0)).repeat(20, 1))

    def forward(self, x: Tensor) -> Tensor:
        held, gate = self.enter(x).chunk(2, -1)
        held = F.silu(self.mix(held.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, into, out = self.select(held).split([1, 4, 4], -1)
        step = F.softplus(step)
        keep = torch.exp(-step.unsqueeze(-1) * self.rate.exp())
        add = step.unsqueeze(-1) * into.unsqueeze(-2) * held.unsqueeze(-1)
        state = torch.zeros_like(add[:, 0])
        found = []
        for at in range(x.shape[1]):
            state = keep[:, at] * state + add[:, at]
            found.append((state * out[:, at].unsqueeze(1)).sum(-1))
        return x + self.leave(torch.stack(found, 1) * F.silu(gate))


def scan(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(SelectiveScan(), nn.LayerNorm(10), nn.Linear(10, 3)))
    x, y = setup.randn(3, 6, 10), setup.randn(3, 6, 3)
    return Training(setup, model, lambda _: F.huber_loss(model(x), y), torch.optim.AdamW(model.parameters(), lr=2e-3))


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(50, 12), nn.Embedding(50, 12)

    def forward(self, words: Tensor, near: Tensor, far: Tensor) -> Tensor:
        centre = self.inner(words)
        close = (centre * self.outer(near)).sum(1)
        apart = torch.bmm(self.outer(far), centre.unsqueeze(2)).squeeze(2)
        return -(F.logsigmoid(close) + F.logsigmoid(-apart).sum(1)).mean()


def skipgram(setup: Setup) -> Training:
    model = setup.place(SkipGram())
    words, near, far = setup.ids(50, 24), setup.ids(50, 24), setup.ids(50, 24, 5)
    return Training(setup, model, lambda _: model(words, near, far), torch.optim.SGD(model.parameters(), lr=0.5))


class Tied(nn.Module):
    """A language model whose head is its embedding, with an RMS norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 16), nn.Parameter(torch.randn(12, 16) * 0.1)
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(3))
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.wide, self.thin = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        held = self.norms[0](x)
        q = self.q(held).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.kv(held).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.thin(F.relu(self.wide(self.norms[1](x))).square())
        return self.norms[2](x) @ self.words.weight.T


def tied(setup: Setup) -> Training:
    model = setup.place(Tied())
    ids = setup.ids(40, 3, 12)

    def loss(_: int) -> Tensor:
        logits = model(ids[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()

    return Training(setup, model, loss, torch.optim.Adam(model.parameters(), lr=2e-3))


FAMILIES: dict[str, Entry] = {
    "fftconv": Entry(fftconv),
    "gru": Entry(gru, "fp32 bf16"),
    "perceiver": Entry(perceiver, "fp32 autocast"),
    "scan": Entry(scan, "fp32 bf16"),
    "skipgram": Entry(skipgram),
    "tied": Entry(tied, "fp32 bf16 autocast"),
}

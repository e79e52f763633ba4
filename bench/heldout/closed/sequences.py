# CLOSED: held out. Whoever changes how runs are compared or judged does not read this file.
"""Families of the closed part that work on sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heldout.training import Entry, Setup, Training


class Speech(nn.Module):
    """Strided convolutions, a recurrent layer in both directions, and a sum over alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(6, 16, 3, 2, 1), nn.Hardtanh(-3, 3), nn.Conv1d(16, 16, 3, 1, 1))
        self.norm = nn.InstanceNorm1d(16, affine=True)
        self.rnn = nn.GRU(16, 10, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        held = F.hardtanh(self.norm(self.front(x))).transpose(1, 2)
        return self.head(self.rnn(held)[0])


def ctc(setup: Setup) -> Training:
    model = setup.place(Speech())
    x = setup.randn(3, 6, 24)
    labels, lengths = torch.randint(1, 8, (3, 5)).to(setup.device), torch.full((3,), 12)

    def loss(_: int) -> Tensor:
        chances = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, labels, lengths, torch.tensor([5, 4, 3]), zero_infinity=True)

    return Training(setup, model, loss, torch.optim.Adam(model.parameters(), lr=2e-3))


class TimeBlock(nn.Module):
    """A transformer block whose norms are moved by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24, elementwise_affine=False)
        self.move = nn.Linear(24, 144)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.wide, self.thin = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.move(F.silu(time)).unsqueeze(1).chunk(6, -1)
        held = self.norm(x) * (1 + scale) + shift
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(held).chunk(3, -1))
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        held = torch.addcmul(shift2, self.norm(x), 1 + scale2)
        return x + gate2 * self.thin(F.gelu(self.wide(held), approximate="tanh"))


class Diffuser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 24), nn.Linear(24, 12)
        self.time = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 24))
        self.blocks = nn.ModuleList(TimeBlock() for _ in range(2))

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        waves = when[:, None].float() * torch.exp(-torch.arange(8, device=x.device) / 2)
        time = self.time(torch.cat([waves.cos(), waves.sin()], 1).to(x.dtype))
        x = F.unfold(x, 2, stride=2).transpose(1, 2)
        held = self.enter(x)
        for block in self.blocks:
            held = block(held, time)
        return F.fold(self.leave(held).transpose(1, 2), (8, 8), 2, stride=2)


def dit(setup: Setup) -> Training:
    model = setup.place(Diffuser())
    image, noise, when = setup.randn(3, 3, 8, 8), setup.randn(3, 3, 8, 8), setup.ids(100, 3)
    share = setup.rand(3, 1, 1, 1)

    def loss(_: int) -> Tensor:
        return F.mse_loss(model(share.sqrt() * image + (1 - share).sqrt() * noise, when).float(), noise.float())

    return Training(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


class Speaker(nn.Module):
    """A decoder that keeps keys and values of the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(24, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        start = 0 if past is None else past[0].shape[2]
        x = self.words(ids) + self.places(torch.arange(start, start + ids.shape[1], device=ids.device))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = torch.matmul(q, k.mT) * 8**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(start + 1)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(self.last(x)), (k, v)


class TrainThenSpeak(Training):
    def step(self, number: int) -> None:
        super().step(number)
        with torch.no_grad(), self.setup.autocast():
            ids, past = self.prompt, None
            for _ in range(4):
                logits, past = self.model(ids, past)
                ids = logits[:, -1].argmax(-1, keepdim=True)

    prompt: Tensor


def generate(setup: Setup) -> Training:
    model = setup.place(Speaker())
    ids = setup.ids(32, 3, 9)

    def loss(_: int) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1).float(), ids[:, 1:].flatten())

    training = TrainThenSpeak(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=2e-3))
    training.prompt = ids[:, :4]
    return training


class LinearAttention(nn.Module):
    """Attention without softmax, as running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bti,btj->btij", k, v).cumsum(1)
        size = (q * k.cumsum(1)).sum(-1, keepdim=True).clamp_min(1e-6)
        return x + self.out(torch.einsum("bti,btij->btj", q, state) / size)


def linearattention(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(LinearAttention(), LinearAttention(), nn.Linear(16, 4)))
    x, y = setup.randn(3, 9, 16), setup.randn(3, 9, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(setup, model, lambda _: F.mse_loss(model(x).tanh(), y.tanh()), optimizer)


class RotaryBlock(nn.Module):
    """Rotary positions and a mask that is added: the smallest number where nothing may be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(16), *(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out, self.gate, self.up, self.down = (
            nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16),
        )  # fmt: skip

    @staticmethod
    def turn(x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[2]).float(), 100 ** -(torch.arange(4) / 4)).repeat(1, 2)
        angle = angle.to(x.device)
        one, other = x.chunk(2, -1)
        return x * angle.cos().to(x.dtype) + torch.cat([-other, one], -1) * angle.sin().to(x.dtype)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        held = self.norm(x)
        q, k, v = (part(held).view(*x.shape[:2], 2, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = self.turn(q) @ self.turn(k).transpose(2, 3) / 8**0.5 + mask
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class RotaryModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 16, padding_idx=0), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(RotaryBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        least = torch.finfo(x.dtype).min
        mask = torch.full((ids.shape[1], ids.shape[1]), least, dtype=x.dtype, device=x.device).triu(1)
        mask = mask + torch.zeros_like(mask).masked_fill((ids == 0)[:, None, None, :], least / 2)
        for block in self.blocks:
            x = block(x, mask.clamp_min(least))
        return self.head(x)


def rotarymask(setup: Setup) -> Training:
    model = setup.place(RotaryModel())
    ids = torch.randint(1, 40, (3, 10))
    ids[2, 7:] = 0
    ids = ids.to(setup.device)

    def loss(_: int) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=0)

    return Training(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=2e-3))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(12, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        one, other = (self.words(ids) + self.places.weight[: ids.shape[1]] for ids in (source, target))
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device, dtype=one.dtype)
        return self.head(self.body(one, other, tgt_mask=mask))


def seq2seq(setup: Setup) -> Training:
    model = setup.place(Translator())
    source, target = setup.ids(30, 3, 8), setup.ids(30, 3, 7)

    def loss(_: int) -> Tensor:
        logits = model(source, target[:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(logits, target[:, 1:].flatten(), label_smoothing=0.1)

    return Training(setup, model, loss, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98)))


FAMILIES: dict[str, Entry] = {
    "ctc": Entry(ctc),
    "dit": Entry(dit, "fp32 autocast bf16"),
    "generate": Entry(generate, "fp32 bf16"),
    "linearattention": Entry(linearattention, "fp32 bf16"),
    "rotarymask": Entry(rotarymask, "fp32 autocast bf16"),
    "seq2seq": Entry(seq2seq, "fp32 autocast"),
}

"""Trains a small character-level GPT on a short text and prints the loss of each step.

The data, the weights and the order of the batches depend on `--seed` alone, so two runs with the same arguments on the
same device print the same losses to the last digit.
"""

from __future__ import annotations

import argparse
import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = """\
The river ran past the mill, and the mill turned the stone, and the stone made flour out of the grain that the carts
brought in from the hills. In the dry months the river was low and the wheel stood still; then the miller mended the
sacks, oiled the axle, and counted what was left. When the rain came back he opened the sluice by a hand's breadth,
listened, and opened it a little more. Nothing in the house was ever quite silent after that until the next summer.
"""


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split_heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        query, key, value = (self.split_heads(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(x.shape)
        return self.out(mixed)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = FeedForward(width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), future)
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer whose output layer shares the weight of the token embedding."""

    def __init__(self, vocabulary: int, *, layers: int, width: int, length: int, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x, future)
        return self.head(self.norm(x))


def encode_text() -> tuple[Tensor, int]:
    """The embedded text as token ids, and how many different ones there are."""
    letters = sorted(set(TEXT))
    number = {letter: index for index, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in TEXT]), len(letters)


def draw_batch(ids: Tensor, *, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same windows one letter further on."""
    starts = torch.randint(len(ids) - length, (batch,), generator=generator)
    windows = torch.stack([ids[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def train(options: argparse.Namespace) -> None:
    """Builds the model and trains it for `options.steps` steps."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    ids, vocabulary = encode_text()
    # The weights are drawn on the CPU, so that they are the same whatever the device is.
    model = GPT(vocabulary, layers=options.layers, width=options.width, length=options.length).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    device_type = torch.device(options.device).type
    for step in range(options.steps):
        tokens, targets = draw_batch(ids, batch=options.batch, length=options.length, generator=generator)
        tokens, targets = tokens.to(options.device), targets.to(options.device)
        low_precision = torch.autocast(device_type, dtype=torch.bfloat16)
        with low_precision if options.dtype == "bf16" else contextlib.nullcontext():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT.")
    parser.add_argument("--device", default="cpu", help="any device torch knows: cpu, cuda, cuda:1, xpu, …")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4, the number of heads")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 trains under autocast")
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args()
    if options.width % 4:
        parser.error(f"--width {options.width} is not a multiple of 4, the number of heads")
    if not 0 < options.length < len(TEXT):
        parser.error(f"--length {options.length} is not between 1 and {len(TEXT) - 1}, the size of the text")
    return options


if __name__ == "__main__":
    train(parse_options())

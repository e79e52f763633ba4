"""Small programs that differ in one thing each, and short ways to record, compare and run the command."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe
from tensorprobe.cli.main import main

WIDTH = 16


class Layer(nn.Module):
    """A linear layer that can be computed in bfloat16 without changing its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.narrow = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.narrow:
            return F.linear(hidden.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()
        return F.linear(hidden, self.weight, self.bias)


class Block(nn.Module):
    """Norm, layer, tanh, dropout, sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = Layer()
        self.after: Callable[[Tensor], Tensor] | None = None
        self.dropout = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        made = torch.tanh(self.layer(self.norm(hidden)))
        if self.after is not None:
            made = self.after(made)
        return hidden + (F.dropout(made, self.dropout) if self.dropout else made)


class Net(nn.Module):
    """An embedding, three blocks, a head and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(step))


@dataclass
class Program:
    """One training: what is changed in the model before it, the data, the seeds and how it is recorded."""

    change: Callable[[Net], None] | None = None
    data: Callable[[int], Tensor] = tokens_of
    seed: int = 0
    draw_seed: int = 0
    steps: int = 1
    rate: float = 1e-3
    settings: dict[str, Any] = field(default_factory=dict)

    def record(self, out: Path) -> Path:
        """Train and capture into the folder."""
        torch.manual_seed(self.seed)
        model = Net()
        if self.change is not None:
            self.change(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate)
        batches = [self.data(step) for step in range(self.steps)]
        torch.manual_seed(self.draw_seed)
        settings = {"level": "api", "mode": "tensor", **self.settings}
        with tensorprobe.capture(out, model=model, **settings) as probe:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                probe.step()
        return out


def compare_programs(folder: Path, baseline: Program, candidate: Program, **options: Any) -> tensorprobe.Result:
    """Record both and compare. A baseline that nothing was changed in is recorded once, and copied for others."""
    return tensorprobe.compare(_baseline(folder / "a", baseline), candidate.record(folder / "b"), **options)


_baselines: dict[str, Path] = {}


def _baseline(out: Path, program: Program) -> Path:
    if program.change is not None or program.data is not tokens_of:
        return program.record(out)
    if repr(program) not in _baselines:
        kept = Path(tempfile.mkdtemp(dir=out.parents[1])) / "run"
        _baselines[repr(program)] = program.record(kept)
    return shutil.copytree(_baselines[repr(program)], out)


def narrow_third_layer(model: Net) -> None:
    model.blocks[2].layer.narrow = True


def scale_second_layer(model: Net) -> None:
    with torch.no_grad():
        model.blocks[1].layer.weight.mul_(1.01)


def other_epsilon(model: Net) -> None:
    model.blocks[1].norm.eps = 1e-3


def drop_out(model: Net) -> None:
    for block in model.blocks:
        block.dropout = 0.5


def recompute(model: Net) -> None:
    model.recompute = True


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Done:
    """Run `tensorprobe` in this process."""
    monkeypatch.setattr(sys, "argv", ["tensorprobe", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return Done(int(ended.value.code or 0), said.out, said.err)

"""The same trainings under two versions of torch, compared: `python -m bench.versions --python OTHER/bin/python`.

Weights and data come from numpy, which draws the same numbers everywhere. Each pair is compared at every level, and once
more with a wrong kernel in the second version: compare has to name the call of that kernel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensorprobe
from tensorprobe.errors import TensorprobeError

LEVELS = ("api", "mix", "module", "aten")
STEPS = 2
Made = tuple[nn.Module, Callable[[], Tensor]]


class Attention(nn.Module):
    """MultiheadAttention as torch has it, with weights and without."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x)
        alone, _ = self.attention(x, mixed, mixed, need_weights=False)
        result: Tensor = self.layer(self.norm(alone)).square().mean() + weights.std()
        return result


class Convolutions(nn.Module):
    """Convolutions of several kinds, a norm, pooling, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.back, self.line = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv1d(8, 8, 3)
        self.recurrent, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.max_pool2d(torch.relu(self.norm(self.first(images))), 2)
        hidden = functional.interpolate(self.back(hidden), scale_factor=0.5, mode="bilinear", align_corners=False)
        hidden, _ = self.recurrent(functional.gelu(self.line(hidden.flatten(2))).transpose(1, 2))
        return functional.cross_entropy(self.head(hidden[:, -1]), torch.tensor([1, 2]))


def attention() -> Made:
    model, data = Attention(), _numbers(2, 7, 32)
    return model, lambda: model(data)


def convolutions() -> Made:
    model, data = Convolutions(), _numbers(2, 3, 12, 12)
    return model, lambda: model(data)


def _from_zoo(name: str) -> Callable[[], Made]:
    def make() -> Made:
        from bench import zoo

        return zoo.MODELS[name]()

    return make


MODELS: dict[str, tuple[Callable[[], Made], str]] = {
    "attention": (attention, "gelu"),
    "convolutions": (convolutions, "relu"),
    "bert": (_from_zoo("bert"), "gelu"),
    "llama": (_from_zoo("llama"), "silu"),
    "resnet": (_from_zoo("resnet"), "relu"),
    "qwen-moe": (_from_zoo("qwen-moe"), "silu"),
    "mamba": (_from_zoo("mamba"), "silu"),
    "vit": (_from_zoo("vit"), "gelu"),
}
"""Each model, and the kernel that is made wrong."""
OPTIMIZERS = {"resnet": torch.optim.SGD, "convolutions": torch.optim.Adam}


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def plant(name: str) -> torch.library.Library:
    """Make the last column of each result of a kernel five percent too large, until the returned object is gone.

    Before torch 2.4 it stays: the models are in an order in which the wrong kernel of one does not come first in another.
    """

    def wrong(x: Tensor, **settings: str) -> Tensor:
        wide = x.double()
        result = {
            "gelu": lambda: 0.5 * wide * (1 + torch.special.erf(wide / 2**0.5)),
            "silu": lambda: wide * torch.special.expit(wide),
            "relu": lambda: wide.clamp(min=0),
        }[name]().to(x.dtype)
        result[..., -1] *= 1.05
        return result

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a kernel that replaces another
        library.impl(name, wrong, "CPU")
    return library


def record(folder: Path, name: str, level: str) -> None:
    """Train a model and record it."""
    torch.manual_seed(0)
    model, loss = MODELS[name][0]()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = _numbers(*parameter.shape, seed=number)
            parameter.copy_(values.div(parameter[0].numel() ** 0.5) if parameter.ndim > 1 else 1 + values.mul(0.1))
    optimizer = OPTIMIZERS.get(name, torch.optim.AdamW)(model.parameters(), lr=1e-3)
    with tensorprobe.capture(folder, model=model.train(), level=level, steps_by="optimizer", overwrite=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()


def execute(out: Path, names: list[str], levels: list[str]) -> None:
    """Record every model at every level, then each once more with its wrong kernel, at level api."""
    torch.set_num_threads(1)
    for name in names:
        for level in levels:
            record(out / f"{name}-{level}", name, level)
    for name in names:
        planted = plant(MODELS[name][1])
        record(out / f"{name}-fault", name, "api")
        del planted


def verdict(baseline: Path, candidate: Path) -> tuple[bool, str]:
    """Whether two runs agree, and the first line of what compare says."""
    try:
        result = tensorprobe.compare(baseline, candidate)
    except TensorprobeError as error:
        return False, f"{type(error).__name__}: {error}"
    return bool(result), str(result).splitlines()[0]


def main() -> int:
    """Print which pairs agree and whether each fault is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.versions")
    parser.add_argument("names", nargs="*", help=f"models (default: {', '.join(MODELS)})")
    parser.add_argument("--python", default=sys.executable, help="Python with the other torch")
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    parser.add_argument("--execute", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names, levels = arguments.names or list(MODELS), arguments.levels.split(",")
    if arguments.execute:
        execute(arguments.out, names, levels)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        for side, python in enumerate((sys.executable, arguments.python)):
            command = [python, "-m", "bench.versions", *names, "--levels", arguments.levels, "--execute", "--out"]
            subprocess.run([*command, str(out / str(side))], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        wrong = 0
        for name in names:
            for level in levels:
                agrees, said = verdict(out / f"0/{name}-{level}", out / f"1/{name}-{level}")
                wrong += not agrees
                print(f"{name:14}{level:8}{said}", flush=True)
            kernel = MODELS[name][1]
            _, said = verdict(out / f"0/{name}-api", out / f"1/{name}-fault")
            named = f".{kernel}." in said
            wrong += not named
            print(f"{name:14}{'fault':8}{'named' if named else 'NOT NAMED'} ({kernel}): {said}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

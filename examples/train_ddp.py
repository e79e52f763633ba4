"""Trains a small network in several CPU processes; each prints the loss of its own part of the data.

    torchrun --nproc-per-node 2 examples/train_ddp.py            DistributedDataParallel
    torchrun --nproc-per-node 2 examples/train_ddp.py --fsdp     FSDP2 (needs torch 2.8): the parameters are sharded

The gradients are averaged over the processes (gloo), so the weights stay the same in all of them.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FEATURES = 16


class Layer(nn.Module):
    """A normalised linear layer with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Regressor(nn.Module):
    """Guesses the sum of the features."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def distribute(model: Regressor, *, sharded: bool) -> nn.Module:
    """The model made ready for several processes: replicated, or sharded layer by layer."""
    if not sharded:
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(options: argparse.Namespace) -> None:
    """Trains in this process; torchrun has told it its rank by environment variables."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    model = distribute(Regressor(options.width, options.layers), sharded=options.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(options.seed + 1000 * (rank + 1))
    for step in range(options.steps):
        features = torch.randn(options.batch, FEATURES, generator=generator)
        loss = F.mse_loss(model(features), features.sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The newline goes out in the same write, so that lines of several processes do not run into each other.
        print(f"rank {rank} step {step} loss {loss.item()!r}\n", end="", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network in several CPU processes.")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters (FSDP2) instead of replicating them")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_options()
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()

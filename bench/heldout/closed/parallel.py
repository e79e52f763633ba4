# CLOSED: held out. Whoever changes how runs are compared or judged does not read this file.
"""Families of the closed part that need two processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.heldout.training import Entry, Setup, Training


def ddpconv(setup: Setup) -> Training:
    """Data parallel convolutions with small buckets, so that several all-reduces overlap with backward."""
    body = [
        nn.Conv2d(3, 12, 3, 2),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3),
        nn.Flatten(),
        nn.Linear(16, 5),
    ]
    model = setup.place(nn.Sequential(*body))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001, broadcast_buffers=False)
    rank = distributed.get_rank()
    x, classes = setup.randn(2, 6, 3, 8, 8)[rank], setup.ids(5, 2, 6)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return Training(setup, model, lambda _: F.cross_entropy(wrapped(x), classes), optimizer)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(9, 12), nn.Linear(7, 12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)


def gathered(setup: Setup) -> Training:
    """Two towers whose negatives come from all ranks; weights are averaged after the step."""
    model, rank = setup.place(Towers()), distributed.get_rank()
    x, y = setup.randn(2, 5, 9)[rank], setup.randn(2, 5, 7)[rank]

    def loss(_: int) -> Tensor:
        one, other = model(x, y)
        everyone = [torch.zeros_like(other) for _ in range(2)]
        distributed.all_gather(everyone, other.detach())
        everyone[rank] = other
        return F.cross_entropy(one @ torch.cat(everyone).T / 0.1, torch.arange(5, device=one.device) + 5 * rank)

    training = Training(setup, model, loss, torch.optim.SGD(model.parameters(), lr=0.3))

    @torch.no_grad()
    def average() -> None:
        for each in model.parameters():
            distributed.all_reduce(each.data)
            each.data.div_(2)

    training.after_step.append(average)
    return training


FAMILIES: dict[str, Entry] = {"ddpconv": Entry(ddpconv, ranks=2), "gathered": Entry(gathered, ranks=2)}

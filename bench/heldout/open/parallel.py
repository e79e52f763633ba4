"""Families of the open part that need two processes. They may be read and used for tuning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.heldout.training import Entry, Setup, Training


def ddp(setup: Setup) -> Training:
    """Data parallel; the all-reduce is started from C++."""
    model = setup.place(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3)))
    wrapped = DistributedDataParallel(model)
    x, y = setup.randn(2, 8, 10)[distributed.get_rank()], setup.randn(2, 8, 3)[distributed.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(setup, model, lambda _: F.mse_loss(wrapped(x), y), optimizer)


class SummedByHand(Training):
    """Gradients are summed over the ranks by the program itself."""

    def update(self) -> None:
        for each in self.model.parameters():
            assert each.grad is not None
            distributed.all_reduce(each.grad)
            each.grad /= distributed.get_world_size()
        super().update()


def manual(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 4)))
    x, classes = setup.randn(2, 6, 8)[distributed.get_rank()], setup.ids(4, 2, 6)[distributed.get_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return SummedByHand(setup, model, lambda _: F.cross_entropy(model(x), classes), optimizer)


FAMILIES: dict[str, Entry] = {"ddp": Entry(ddp, ranks=2), "manual": Entry(manual, ranks=2)}

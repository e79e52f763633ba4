"""One of two processes: python parallel_worker.py STORE ANSWER, with RANK and WORLD_SIZE in the environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import tracing
from torch import nn

from bench.sim.models import workload
from tensorprobe import sim


def place_of(fault: sim.Fault) -> list[object] | None:
    """The first collective that differs from a right run on this rank."""
    right, _ = tracing.trace(workload("parallel", "npu"), 1)
    with sim.installed([fault]):
        wrong, _ = tracing.trace(workload("parallel", "npu"), 1)
    found = tracing.first_difference(right.ops, wrong.ops)
    return [found[0].aten, found[0].number, found[0].api] if found else None


def ddp_losses(device: str) -> tuple[list[float], float]:
    """Three steps of DistributedDataParallel; the losses and one weight at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 8).to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = parallel(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model[0].weight[0, 0].item()


def main() -> None:
    store, answer = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    sim.enable()
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size)
    places = {entry.name: place_of(entry.fault) for entry in sim.catalog() if entry.model == "parallel"}
    losses, weight = ddp_losses("npu")
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    answers = {
        "places": places,
        "ddp_losses": losses,
        "ddp_weight": weight,
        "ddp_cpu_losses": ddp_losses("cpu")[0],
        "gathered_objects": objects,
    }
    Path(answer).write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

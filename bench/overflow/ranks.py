"""Planted overflows in a program of two processes, for bench.overflow: `run_ranks(folder)`.

Also `python -m bench.overflow.ranks RANK FOLDER`. Each process watches all programs, one after the other. The merged report of both
ranks is compared.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.driver import environment
from bench.overflow.case import Outcome, Planted, Watching, expected_of, plants, told_arrival, told_first
from tensorprobe.watches.overflow import OverflowWatch, find_overflow

WORLD = 2
TIME_LIMIT_S = 120
RANKS: dict[str, Planted] = {}
plant = functools.partial(plants, RANKS)


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


@plant("Torch.exp.0.forward inf rank 1")
def before_an_all_reduce(watching: Watching) -> None:
    with watching():
        x = torch.exp(torch.full((3,), 100.0 * dist.get_rank()))
        dist.all_reduce(x)
        x.sum()


@plant("Torch.exp.0.forward inf rank 1")
def before_an_all_reduce_that_is_waited_for(watching: Watching) -> None:
    with watching():
        x = torch.exp(torch.full((3,), 100.0 * dist.get_rank()))
        dist.all_reduce(x, async_op=True).wait()
        x.sum()


@plant("Distributed.all_reduce.0.forward inf", "Distributed.all_reduce.0.forward inf rank 1")
def sum_of_an_all_reduce(watching: Watching) -> None:
    with watching():
        dist.all_reduce(torch.full((3,), 3e38))


@plant("Torch.sqrt.0.forward nan")
def before_a_broadcast(watching: Watching) -> None:
    with watching():
        x = torch.sqrt(torch.full((3,), dist.get_rank() - 0.5))
        dist.broadcast(x, src=0)
        x.sum()


@plant("Torch.exp.0.forward inf rank 1")
def before_an_all_gather(watching: Watching) -> None:
    with watching():
        parts = [torch.zeros(2) for _ in range(WORLD)]
        dist.all_gather(parts, torch.exp(torch.full((2,), 100.0 * dist.get_rank())))
        torch.stack(parts).mean()


@plant("Torch.sqrt.0.backward inf rank 1")
def backward_of_one_replica(watching: Watching) -> None:
    model = wrapped(nn.Linear(2, 2, bias=False))
    nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model):
        for _ in range(2):
            optimizer.zero_grad()
            torch.sqrt(model(torch.ones(1, 2) * (1 - dist.get_rank()))).sum().backward()
            optimizer.step()


@plant(arrivals=("Functional.linear.0.forward had input rank 1",))
def data_of_one_replica(watching: Watching) -> None:
    model = wrapped(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(1, 2) / (1 - dist.get_rank())
    with watching(model):
        model(batch).square().mean().backward()
        optimizer.step()


@plant()
def replicas_with_masks(watching: Watching) -> None:
    model = wrapped(nn.Linear(4, 4))
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    optimizer = torch.optim.AdamW(model.parameters())
    with watching(model):
        for _ in range(2):
            optimizer.zero_grad()
            F.softmax(model(torch.randn(4, 4)).masked_fill(future, -torch.inf), -1).square().mean().backward()
            optimizer.step()


def run_ranks(folder: Path, popen: Callable[..., Any] = subprocess.Popen) -> list[Outcome]:
    """Run both processes, and read what the watches of each program say together."""
    workers = [
        popen(
            [sys.executable, "-m", "bench.overflow.ranks", str(rank), str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(OMP_NUM_THREADS="1"),
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [worker.communicate(timeout=TIME_LIMIT_S)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a process failed: " + "\n".join(errors))
    return [read_ranks(planted, folder / planted.name) for planted in RANKS.values()]


def read_ranks(planted: Planted, folder: Path) -> Outcome:
    """What the watches of all ranks say together."""
    report = find_overflow(folder).summary
    told = [told_first(first) for first in report.first_nonfinite] + [
        told_arrival(arrival) for arrival in report.arrivals
    ]
    error = "" if report.ranks == list(range(WORLD)) else f"watched were the ranks {report.ranks}"
    return Outcome(planted.name, expected_of(planted), told, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rank", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    rank, folder = options.rank, options.folder
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for name, planted in RANKS.items():
        torch.manual_seed(rank)

        def watching(model: Any = None, name: str = name, **settings: Any) -> OverflowWatch:
            return OverflowWatch(model, out=folder / name, **settings)

        planted.program(watching)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

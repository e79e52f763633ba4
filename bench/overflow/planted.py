"""All planted overflows by where they run, and a process's work on them, for bench.overflow."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.overflow.case import Outcome, Planted, watch_planted
from bench.overflow.forward import FORWARD
from bench.overflow.masks import MASKS
from bench.overflow.training import TRAINING
from bench.overflow.ways import WAYS

ANYWHERE: dict[str, Planted] = {**FORWARD, **WAYS, **TRAINING, **MASKS}
"""Programs that name no device."""
FLAGGED = {"gradient_of_a_constant_row": ("Tensor.std.0.backward flagged",)}
"""On a device with an overflow flag: torch divides by zero there and puts zero in the place of the result."""


def on_cpu(work: Path) -> Iterator[Outcome]:
    for planted in ANYWHERE.values():
        torch.manual_seed(0)
        yield watch_planted(planted, work)


def on_device(work: Path, names: tuple[str, ...] = tuple(ANYWHERE)) -> Iterator[Outcome]:
    """The same programs with all their tensors on the simulated device, which is enabled."""
    for name in names:
        planted = dataclasses.replace(ANYWHERE[name], first_nonfinite=FLAGGED.get(name, ANYWHERE[name].first_nonfinite))
        torch.manual_seed(0)
        with torch.device("npu"):
            yield watch_planted(planted, work)


def on_sim(work: Path) -> Iterator[Outcome]:
    """Wrong kernels."""
    from bench.overflow.sim import SIM

    for planted in SIM.values():
        torch.manual_seed(0)
        yield watch_planted(planted, work)


def on_ranks(work: Path) -> Iterator[Outcome]:
    from bench.overflow.ranks import run_ranks

    yield from run_ranks(work)


PLACES: dict[str, Callable[[Path], Iterator[Outcome]]] = {
    "cpu": on_cpu,
    "npu": on_device,
    "npu, wrong kernels": on_sim,
    "two ranks": on_ranks,
}


def outcomes_of(place: str) -> list[Outcome]:
    """Run all programs of a place in this process."""
    if place.startswith("npu"):
        from tensorprobe import sim

        sim.enable("npu", torch_npu=True)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="planted-") as work:
        return list(PLACES[place](Path(work)))

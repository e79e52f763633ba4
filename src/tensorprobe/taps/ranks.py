"""Which process this is of the training: rank, world size, device, parallel coordinates."""

from __future__ import annotations

import os
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.taps.module_names import parameters_of


def find_rank() -> int:
    """Return the rank from torch.distributed, else from the launcher, else 0."""
    if _distributed():
        return int(torch.distributed.get_rank())
    return _number("RANK", 0)


def find_world_size() -> int:
    """Return the number of ranks, from the same sources in the same order."""
    if _distributed():
        return int(torch.distributed.get_world_size())
    return max(_number("WORLD_SIZE", 1), find_rank() + 1)


def find_rank_of(model: Any) -> int:
    """Return the rank from torch.distributed or the launcher, else the number of the model's device, else 0."""
    if _distributed() or os.environ.get("RANK", "").isdigit():
        return find_rank()
    _, _, number = main_device(model).partition(":")
    return int(number) if number else 0


def coordinates() -> dict[str, int]:
    """Return the place of this rank in the device mesh, by dimension; empty if there is none."""
    if not _distributed():
        return {}
    try:
        current = torch_names.current_mesh()
        place = None if current is None else current.get_coordinate()
        names = () if current is None else current.mesh_dim_names or ()
    except RuntimeError:  # torch has no current mesh outside of a `with mesh:`
        return {}
    return dict(zip(names, place or (), strict=False))


def main_device(model: Any) -> str:
    """Return the device of a model's first parameter; cpu if it has none."""
    with torch_names.no_overrides():
        for parameter in parameters_of(model) if isinstance(model, torch.nn.Module) else ():
            return str(torch_names.device_of(parameter))
    return "cpu"


def _distributed() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default

"""Which process this is of the training: rank, world size, device, parallel coordinates."""

from __future__ import annotations

import os
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.taps.module_names import parameters_of


def find_rank() -> int:
    """The rank torch.distributed has, else the one the launcher gave, else 0."""
    if _distributed():
        return int(torch.distributed.get_rank())
    return _number("RANK", 0)


def find_world_size() -> int:
    """How many ranks there are, told in the same order of trust."""
    if _distributed():
        return int(torch.distributed.get_world_size())
    return max(_number("WORLD_SIZE", 1), find_rank() + 1)


def find_rank_of(model: Any) -> int:
    """The rank torch.distributed or the launcher knows, else the number of the device that the model is on, else 0."""
    if _distributed() or os.environ.get("RANK", "").isdigit():
        return find_rank()
    _, _, number = main_device(model).partition(":")
    return int(number) if number else 0


def coordinates() -> dict[str, int]:
    """Where this rank stands in the mesh of its training, by dimension; empty when there is none."""
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
    """The device a model's first parameter is on; cpu when there is none."""
    with torch_names.no_overrides():
        for parameter in parameters_of(model) if isinstance(model, torch.nn.Module) else ():
            return str(torch_names.device_of(parameter))
    return "cpu"


def _distributed() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default

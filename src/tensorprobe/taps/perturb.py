"""Changes a program in a way that must not matter: the number of threads, or one unit in the last place.

Only `capture --perturb` asks for it. Two runs of one program that differ in this show how far right runs may be apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorprobe.taps.alone import unseen


def change_threads(number: int) -> None:
    """Set another number of threads; `number` counts the runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads >> number) if threads > 1 else 1 + number)


def move_by_one_unit(model: nn.Module, seed: int) -> None:
    """Move the parameters by one unit in the last place now, and the arguments of the model before each of its calls."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(_moved(parameter, draw))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def moved(value: Any) -> Any:
            plain = isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
            return _moved(value, draw) if plain else value

        return tuple(moved(each) for each in args), {name: moved(each) for name, each in kwargs.items()}

    model.register_forward_pre_hook(before, with_kwargs=True)


def _moved(values: Tensor, draw: torch.Generator) -> Tensor:
    """Return the values, each a unit up, a unit down, or as it is."""
    with unseen(), torch.no_grad():
        return _unseen_moved(values, draw)


def _unseen_moved(values: Tensor, draw: torch.Generator) -> Tensor:
    signs = torch.randint(-1, 2, values.shape, generator=draw).to(values.device, values.dtype)
    return values + signs * torch.finfo(values.dtype).eps / 2 * values.abs() * 1.5

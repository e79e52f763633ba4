"""Moving a module to the simulated device and back keeps its parameters the same objects.

torch gives a module new parameters when it moves to a device of this kind, where for its own devices it changes them
in place. Tied weights would come apart, and an optimizer made before the move would go on with the old ones. torch
can swap them in place on request: it is asked to, for moves to and from the device only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensorprobe import torch_names


def install_module_moves(name: str) -> None:
    """Wrap the three methods that move a module: `to`, `cpu`, and the one called like the device."""

    def target_of_to(args: Any, kwargs: Any) -> str | None:
        device = torch_names.functions_of_nn._parse_to(*args, **kwargs)[0]
        return None if device is None else str(device.type)

    targets: dict[str, Callable[[Any, Any], str | None]] = {
        "to": target_of_to,
        "cpu": lambda _args, _kwargs: "cpu",
        name: lambda _args, _kwargs: name,
    }
    for method, target in targets.items():
        setattr(nn.Module, method, _keeping_parameters(getattr(nn.Module, method), target, name))


def _keeping_parameters(
    move: Callable[..., Any], target: Callable[[Any, Any], str | None], name: str
) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        if swapping or not _crosses(self, target(args, kwargs), name):
            return move(self, *args, **kwargs)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return move(self, *args, **kwargs)
        except RuntimeError as refused:
            if "Couldn't swap" not in str(refused):
                raise
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        # Something in C++ still holds a parameter, such as a graph not yet freed: move it torch's usual way.
        return move(self, *args, **kwargs)

    return moved


def _crosses(module: nn.Module, target: str | None, name: str) -> bool:
    if target is None:
        return False
    here = {parameter.device.type for parameter in module.parameters()}
    return bool(here - {name}) if target == name else name in here

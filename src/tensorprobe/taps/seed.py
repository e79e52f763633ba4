"""Fixes every source of randomness that a training run draws from."""

from __future__ import annotations

import os
import random
from functools import wraps
from typing import Any

import torch
from torch.nn import functional

from tensorprobe import torch_names
from tensorprobe.errors import SettingsError

_DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HCCL_DETERMINISTIC": "true",
}


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Seed python, numpy and torch on every device type present.

    `mode=True` also turns deterministic algorithms on, with the environment variables they need. What the user has
    switched on already stays on, and a variable that is set keeps its value. SettingsError for a seed outside 0 … 2**32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise SettingsError(f"seed is {seed!r}; it must be a whole number from 0 to {2**32 - 1}.")
    if not isinstance(mode, bool):
        raise SettingsError(f"mode is {mode!r}; it must be True or False.")
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    _seed_numpy(seed)
    torch.manual_seed(seed)
    for device in torch_names.accelerators().values():
        if hasattr(device, "manual_seed_all"):
            device.manual_seed_all(seed)
    if mode:
        for variable, value in _DETERMINISTIC_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def _seed_numpy(seed: int) -> None:
    import numpy

    numpy.random.seed(seed)


def remove_dropout() -> None:
    """Give `F.dropout`, `F.dropout2d` and `F.dropout3d` the probability 0 for the rest of the process."""

    def without(original: Any) -> Any:
        @wraps(original)
        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            given = (input, 0.0 if 0 <= p <= 1 else p, training, inplace)  # torch refuses any other p
            if torch.overrides.has_torch_function_unary(input):
                return torch.overrides.handle_torch_function(original, (input,), *given)  # by the name that it replaces
            return original(*given)

        dropout.without_effect = True  # type: ignore[attr-defined]
        return dropout

    for name in ("dropout", "dropout2d", "dropout3d"):
        original = getattr(functional, name)
        if not hasattr(original, "without_effect"):
            torch_names.resolve_name(
                original
            )  # torch looks for the names of its functions once: before they are replaced
            setattr(functional, name, without(original))

"""Fixes every source of randomness that a training run draws from."""

from __future__ import annotations

import os
import random

import torch

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

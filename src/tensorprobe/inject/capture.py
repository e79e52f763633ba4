"""Starts a probe in a script that was not edited: when it first calls a module from outside of any other.

Until then only `nn.Module.__call__` is wrapped; what a script computes while it builds its model is not recorded.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn


def begin(payload: str) -> None:
    """Wait for the first call of a module, then record as the JSON in `payload` says."""
    orders = json.loads(payload)
    original = nn.Module.__call__

    waiting = True

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal waiting
        if not waiting or _is_data_worker():
            return original(module, *args, **kwargs)
        waiting = False
        topmost = nn.Module.__call__ is __call__
        if topmost:
            nn.Module.__call__ = original
        _start(orders, module)
        # When another wrapper stands around this one, it has been passed already: calling it again would never end.
        return (nn.Module.__call__ if topmost else original)(module, *args, **kwargs)

    nn.Module.__call__ = __call__


def _start(orders: dict[str, Any], module: nn.Module) -> None:
    """Start the probe, unless the script captures by itself. What hinders it is said on stderr; training goes on."""
    from tensorprobe.errors import TensorprobeError
    from tensorprobe.taps.probe import Probe, active_probe

    if active_probe() is not None:
        sys.stderr.write("tensorprobe: the script captures by itself; nothing is recorded from outside.\n")
        return
    try:
        probe = Probe(
            orders["out"], model=module, overwrite=orders["overwrite"], steps_by="optimizer", **orders["settings"]
        )
        probe.start()
    except TensorprobeError as error:
        sys.stderr.write(f"tensorprobe: not recording. {type(error).__name__}: {error}\n")


def _is_data_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None

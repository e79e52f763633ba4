"""Starts a probe in an unmodified script at its first module call.

What a script computes while it builds its model is not recorded.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from torch import nn

from tensorprobe.taps.module_tap import before_first_module


def begin(payload: str) -> None:
    """Record from the first module call on, with the settings in the JSON `payload`."""
    before_first_module(partial(_start, json.loads(payload)))


def _start(orders: dict[str, Any], module: nn.Module) -> None:
    """Start the probe, unless the script captures itself. Errors go to stderr, and training continues."""
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

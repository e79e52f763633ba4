"""Starts a probe in an unmodified script at its first module call.

What a script computes while it builds its model is not recorded.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tensorprobe.taps.module_tap import before_first_module


def begin(payload: str) -> None:
    """Record from the first module call on, with the settings in the JSON `payload`."""
    before_first_module(partial(_start, json.loads(payload)))


def _start(orders: dict[str, Any], module: nn.Module) -> None:
    """Start the probe, unless the script captures itself. Errors go to stderr, and training continues."""
    from tensorprobe.errors import RunExists, TensorprobeError
    from tensorprobe.record.run_folder import own_place
    from tensorprobe.taps.probe import Probe, active_probe
    from tensorprobe.taps.ranks import find_rank

    if active_probe() is not None:
        sys.stderr.write("tensorprobe: the script captures by itself; nothing is recorded from outside.\n")
        return
    out = Path(orders["out"])
    settings = {"model": module, "steps_by": "optimizer", **orders["settings"]}
    try:
        if not _is_taken(out, find_rank(), orders["started"]):
            try:
                Probe(out, overwrite=orders["overwrite"], **settings).start()
                return
            except RunExists:
                if not _is_taken(out, find_rank(), orders["started"]):
                    raise
        Probe(own_place(out), **settings).start()
    except (TensorprobeError, OSError) as error:
        sys.stderr.write(f"tensorprobe: not recording. {type(error).__name__}: {error}\n")


def _is_taken(out: Path, rank: int, started: float) -> bool:
    """Return whether another process of this command records as this rank."""
    try:
        return (out / f"rank{rank}.json").stat().st_mtime >= started
    except OSError:
        return False

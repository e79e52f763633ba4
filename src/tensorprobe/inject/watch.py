"""Starts an online or overflow watch in an unmodified script, at its first module call."""

from __future__ import annotations

import atexit
import json
import sys
from functools import partial
from typing import Any

from torch import nn

from tensorprobe.model.interrupts import let_through
from tensorprobe.taps.beginnings import before_first_module

HOOK = "tensorprobe.inject.watch:begin"


def begin(payload: str) -> None:
    """Watch with the settings in the JSON `payload`: `kind` is online or overflow."""
    before_first_module(partial(_start, json.loads(payload)))


def _start(orders: dict[str, Any], module: nn.Module) -> None:
    """Start the watch, unless the script has one or captures. Errors go to stderr, and training continues."""
    try:
        from tensorprobe.taps.probe import active_probe

        if active_probe() is not None:
            sys.stderr.write(
                "tensorprobe: the script watches or captures by itself; nothing is watched from outside.\n"
            )
            return
        if orders["kind"] == "online":
            from tensorprobe.watches.online import online

            watch: Any = online(module, **orders["settings"])
        else:
            from tensorprobe.watches.overflow.watch import OverflowWatch

            watch = OverflowWatch(module, steps_by="optimizer", **orders["settings"])
        watch.start()
        atexit.register(watch.stop)
    except Exception as error:
        let_through(error)
        sys.stderr.write(f"tensorprobe: not watching. {type(error).__name__}: {error}\n")

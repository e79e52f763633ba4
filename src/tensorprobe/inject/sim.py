"""Gives the simulated device to a program that knows nothing of it: called inside that program right after torch is
imported.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Iterable
from typing import Any

from tensorprobe import sim
from tensorprobe.inject import SIM_HOOK as HOOK
from tensorprobe.sim.faults import Fault

__all__ = ["HOOK", "begin", "payload"]


def payload(name: str, faults: Iterable[Fault], *, torch_npu: bool = False) -> str:
    """Return the text for `begin` in another process."""
    return json.dumps({"name": name, "torch_npu": torch_npu, "faults": [fault.as_dict() for fault in faults]})


def begin(text: str) -> None:
    """Enable the device and install the faults of `payload`."""
    settings: dict[str, Any] = json.loads(text)
    sim.enable(settings["name"], torch_npu=settings["torch_npu"])
    from tensorprobe.sim import npu_module  # needs torch, which the command `sim` itself does not import

    npu_module.offer(settings["name"])
    for fault in settings["faults"]:
        sim.install(sim.make_fault(**fault))
    if settings["faults"]:
        atexit.register(_tell_silent_faults)


def _tell_silent_faults() -> None:
    """Say which faults have changed nothing: the program does not have the call that they wait for."""
    for reason in sim.silent():
        sys.stderr.write(f"tensorprobe: {reason}\n")

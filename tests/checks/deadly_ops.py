"""Ops that do not come back. A process that is started with `environment_with_deadly_ops` has them under `torch.ops.deadly`."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from typing import Any

import numpy as np
import pytest

from tensorprobe.inject import environment
from tests.builders.runs import call

_KEPT: list[Any] = []
HOOK = "tests.checks.deadly_ops:begin"


def begin(log: str) -> None:
    """Register the ops. `log` is the name of a socket that `deadly.hang` sends its process to: it may write no file."""
    import torch

    def crash(x: torch.Tensor) -> torch.Tensor:
        ctypes.string_at(0)
        return x

    def leave(x: torch.Tensor) -> torch.Tensor:
        os.write(2, b"nothing to be done\n")
        os._exit(7)

    def hang(x: torch.Tensor) -> torch.Tensor:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(str(os.getpid()).encode(), f"\0{log}")
        while True:
            signal.pause()

    library = torch.library.Library("deadly", "DEF")
    for name, function in (("crash", crash), ("leave", leave), ("hang", hang)):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, function, "CPU")
    _KEPT.append(library)


def set_environment(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Python processes that are started from here on have the ops after they have imported torch; where hanging ones report."""
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"deadly-{os.getpid()}-{told.fileno()}-{time.monotonic_ns()}"
    told.bind(f"\0{name}")
    for key, value in environment({HOOK: name}, os.environ).items():
        monkeypatch.setenv(key, value)
    return told


def deadly(name: str, number: int = 0) -> dict[str, Any]:
    """A recorded call of such an op."""
    x = np.ones(3, dtype=np.float32)
    return call(f"Ops.deadly.{name}.{number}.forward", inputs=[x], outputs=[x], args=[{"slot": "input.0"}])


def harmless(number: int, size: int = 4) -> dict[str, Any]:
    """A recorded call of an op that always comes back; another size makes it another call."""
    x = np.linspace(-1, 1, size, dtype=np.float32)
    return call(f"Torch.exp.{number}.forward", inputs=[x], outputs=[np.exp(x)], args=[{"slot": "input.0"}])

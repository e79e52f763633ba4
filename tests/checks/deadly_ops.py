"""Ops that do not come back. A process that is started with `environment_with_deadly_ops` has them under `torch.ops.deadly`."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorprobe.inject import environment
from tests.builders.runs import call

_KEPT: list[Any] = []
HOOK = "tests.checks.deadly_ops:begin"


def begin(log: str) -> None:
    """Register the ops. `log` is a file into which `deadly.told` writes the process it was called in."""
    import torch

    def crash(x: torch.Tensor) -> torch.Tensor:
        ctypes.string_at(0)
        return x

    def leave(x: torch.Tensor) -> torch.Tensor:
        os.write(2, b"nothing to be done\n")
        os._exit(7)

    def hang(x: torch.Tensor) -> torch.Tensor:
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        while True:
            signal.pause()

    library = torch.library.Library("deadly", "DEF")
    for name, function in (("crash", crash), ("leave", leave), ("hang", hang)):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, function, "CPU")
    _KEPT.append(library)


def set_environment(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """Python processes that are started from here on have the ops after they have imported torch."""
    for name, value in environment({HOOK: str(log)}, os.environ).items():
        monkeypatch.setenv(name, value)


def deadly(name: str, number: int = 0) -> dict[str, Any]:
    """A recorded call of such an op."""
    x = np.ones(3, dtype=np.float32)
    return call(f"Ops.deadly.{name}.{number}.forward", inputs=[x], outputs=[x], args=[{"slot": "input.0"}])


def harmless(number: int, size: int = 4) -> dict[str, Any]:
    """A recorded call of an op that always comes back; another size makes it another call."""
    x = np.linspace(-1, 1, size, dtype=np.float32)
    return call(f"Torch.exp.{number}.forward", inputs=[x], outputs=[np.exp(x)], args=[{"slot": "input.0"}])

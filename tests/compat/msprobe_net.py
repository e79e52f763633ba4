"""A small net, its training, and its dump by PrecisionDebugger; what stands on disk then."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import msprobe.pytorch as msprobe
from tensorprobe import open_run
from tensorprobe.legacy.msprobe.debugger import PrecisionDebugger
from tensorprobe.record.run import Run
from tests.builders.checker import read_strictly

Json = dict[str, Any]
HERE = f"proc{os.getpid()}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": F.gelu(self.up(x)) * scale}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x + 1, scale=0.5)["y"]
        x = x.add(1) + 2 * x
        x = torch.where(x > 0, x, torch.tensor(float("-inf")))
        return self.head(torch.softmax(x, dim=-1))


def train(net: Net) -> Tensor:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    loss = F.cross_entropy(net(x), torch.tensor([0, 2]))
    loss.backward()
    return loss.detach()


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def forget_debugger() -> None:
    """The debugger of the process ends, as it does when the process does; the next one begins anew."""
    made, PrecisionDebugger._instance = PrecisionDebugger._instance, None
    if made is not None:
        atexit.unregister(made._at_exit)
        made._at_exit()


def write_config(folder: Path, section: Json | None = None, **settings: Any) -> str:
    """A config.json as the older tool ships it, with its sections for other tasks."""
    config = {
        "task": "statistics",
        "dump_path": str(folder / "dump"),
        "rank": [],
        "step": [],
        "level": "L1",
        **settings,
    }
    config[config["task"]] = {"scope": [], "list": [], "data_mode": ["all"], **(section or {})}
    config.setdefault("grad_probe", {"grad_level": "L1", "param_list": []})
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1))
    return str(path)


def dump(folder: Path, section: Json | None = None, steps: int = 1, **settings: Any) -> Run:
    """The dump of some training steps."""
    net = make_net()
    debugger = msprobe.PrecisionDebugger(config_path=write_config(folder, section, **settings))
    for _ in range(steps):
        debugger.start(model=net)
        train(net)
        debugger.stop()
        debugger.step()
    forget_debugger()
    return open_run(folder / "dump")


def index(folder: Path, step: int = 0, file: str = "dump.json") -> Json:
    return read_strictly(folder / "dump" / f"step{step}" / HERE / file)


def names(run: Run) -> list[str]:
    return [call.name for call in run.calls()]


def files_of(tree: Any) -> Iterator[str]:
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from files_of(value)
    if isinstance(tree, dict) and "data_name" in tree:
        yield tree["data_name"]

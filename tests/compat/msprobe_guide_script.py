"""A training script as a user of msprobe has it: `python msprobe_guide_script.py DEVICE CONFIG [DEVICE CONFIG]...`.

It knows no names but those of the older tool, and runs under the published package as it is. With several configs each is a
training of its own. A line of JSON is printed for each: what the training has come to, and what it comes to without the tool.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from msprobe.pytorch import PrecisionDebugger

STEPS = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts, self.softmax = nn.Linear(8, 24), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).chunk(3, dim=-1)
        future = torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1)
        scores = torch.matmul(query, key.transpose(1, 2)).masked_fill(future, float("-inf"))
        return torch.matmul(self.softmax(scores), value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.attention = nn.Embedding(11, 8), Attention()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor, strength: Tensor) -> Tensor:
        x = self.token(tokens) * strength
        x = x + self.attention(x)
        return self.head(F.gelu(self.norm(x)))


def train(device: str, config: str | None) -> dict[str, Any]:
    """Some steps, dumped if there is a config. For a check of overflows the last batch is one that overflows."""
    settings = {} if config is None else json.loads(Path(config).read_text())
    torch.manual_seed(1234)
    model: nn.Module = Net().to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    debugger = None if config is None else PrecisionDebugger(config_path=config)
    losses = []
    for step in range(STEPS):
        text = torch.randint(11, (2, 7), generator=random).to(device)
        spoiled = step == STEPS - 1 and settings.get("task") == "overflow_check"
        if debugger is not None:
            debugger.start(model)
        logits = model(text[:, :-1], torch.tensor(1e30 if spoiled else 1.0).to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        if debugger is not None:
            debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        if debugger is not None:
            debugger.step()
        losses.append(loss.item())
    digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values()))
    return {"losses": losses, "weights": digest.hexdigest()}


def forget_debugger() -> None:
    """A process has one debugger, to its end. So that one process can do for many, this is the end of that one."""
    from tests.compat import msprobe_net

    msprobe_net.forget_debugger()


def try_out(device: str, config: str) -> dict[str, Any]:
    """What a training has come to, and what is left of the tool in torch."""
    try:
        found = train(device, config)
    except ValueError as overflow:
        PrecisionDebugger.stop()
        found = {"overflow": str(overflow)}
    return {**found, "installed": torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()}


def main(*given: str) -> None:
    devices, configs = given[::2], given[1::2]
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,npu:hccl" if "npu" in devices else "gloo")
    plain = {device: train(device, None) for device in dict.fromkeys(devices)}
    for device, config in zip(devices, configs, strict=True):
        if PrecisionDebugger._instance is not None:
            forget_debugger()
        line = json.dumps({"config": config, **try_out(device, config), "plain": plain[device]})
        sys.stdout.write(f"{line}\n")  # at once: another rank writes, too
        sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

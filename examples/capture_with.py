"""Records two steps of a training loop, then opens the record and prints what is in it.

python examples/capture_with.py --out runs/a
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe


def train_and_record(out: str) -> None:
    """Trains for three steps; steps 0 and 2 are recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tensorprobe.capture(out, model=model, level="api", mode="tensor", steps=[0, 2], overwrite=True) as probe:
        for _ in range(3):
            features = torch.randn(4, 8)
            loss = F.mse_loss(model(features), features.sum(-1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.step()


def describe(out: str) -> None:
    """Prints how much was recorded, and one tensor of it."""
    run = tensorprobe.open_run(out)
    calls = [call for step in run.steps for call in run.calls(step=step, rank=0)]
    linear = next(call for call in calls if call.op == "Functional.linear")
    slot = linear.slots[0]
    print(f"{out}: steps {list(run.steps)}, {len(calls)} calls")
    print(f"{linear.name} {slot.name}: {slot.dtype} {list(slot.shape)}, mean {slot.tensor().mean().item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record two training steps and open the record.")
    parser.add_argument("--out", default="runs/capture_with", help="folder of the run; an older run in it is replaced")
    options = parser.parse_args()
    train_and_record(options.out)
    describe(options.out)

"""A test that fails when a commit changes the numbers of a training step.

pytest examples/test_golden.py      the first run writes examples/goldens/train-step.tpz, later runs compare with it
"""

import torch
from torch import nn


def test_train_step(tensorprobe_golden):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(4, 8)
    with tensorprobe_golden("train-step", model=model):
        model(inputs).square().mean().backward()
        optimizer.step()

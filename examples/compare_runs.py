"""Trains a small network twice, the second time with another GELU, and finds the call where the two trainings part.

    python examples/compare_runs.py --approximate tanh      the second training approximates GELU by tanh: diverged
    python examples/compare_runs.py                         both are the same: agrees

Ends with the exit code of the comparison: 0 when the trainings agree, 1 when they diverge.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import tensorprobe


def train(run: str, approximate: str, steps: int) -> None:
    """Records a training of a few steps; weights and data are the same each time."""
    tensorprobe.seed_all(1234)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate=approximate), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tensorprobe.capture(run, model=model, overwrite=True) as probe:
        for _ in range(steps):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.step()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Record two trainings and compare them.")
    parser.add_argument("--approximate", choices=["none", "tanh"], default="none", help="GELU of the second training")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", default="runs", help="folder for the two runs")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_options()
    train(f"{options.out}/exact", "none", options.steps)
    train(f"{options.out}/other", options.approximate, options.steps)
    result = tensorprobe.compare(f"{options.out}/exact", f"{options.out}/other")
    print(result)
    print(f"{sum(row.verdict == 'diverges' for row in result.rows)} of {len(result.rows)} pairs of tensors diverge")
    sys.exit(result.exit_code)

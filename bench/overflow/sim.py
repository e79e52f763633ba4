"""Planted overflows on the simulated device: kernels that are wrong, that saturate, that only raise a flag. For bench.overflow.

`sim.enable("npu", torch_npu=True)` must have been called before the first backward of the process.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from bench.overflow.case import Planted, Watching, plants
from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.sim.faults import make_fault

SIM: dict[str, Planted] = {}
plant = functools.partial(plants, SIM)
DEVICE = "npu"
HALF = torch.float16


@plant("Functional.softmax.0.forward inf abnormal")
def kernel_that_gives_infinity(watching: Watching) -> None:
    scores = torch.randn(3, 4).to(DEVICE)
    with watching(), sim.installed([make_fault(op="aten::_softmax", kind="overflow")]):
        (F.softmax(scores, -1) @ scores.T).sum()


@plant("Functional.layer_norm.0.forward nan step 1 abnormal")
def kernel_that_gives_nan_in_the_second_step(watching: Watching) -> None:
    norm = nn.LayerNorm(4).to(DEVICE)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    fault = make_fault(op="aten::native_layer_norm", kind="nan", index=3, nth=1)
    with watching(norm), sim.installed([fault]):
        for _ in range(2):
            norm(torch.ones(2, 4).to(DEVICE)).sum().backward()
            optimizer.step()


@plant("Functional.gelu.0.backward inf abnormal")
def kernel_that_is_wrong_in_backward(watching: Watching) -> None:
    linear = nn.Linear(3, 3).to(DEVICE)
    batch = torch.randn(2, 3).to(DEVICE)
    with watching(linear), sim.installed([make_fault(op="aten::gelu_backward", kind="overflow")]):
        F.gelu(linear(batch)).square().sum().backward()


@plant("Torch.matmul.0.forward inf abnormal")
def kernel_that_overflows_early(watching: Watching) -> None:
    """Magnitudes above 2,048 become infinite: float16 goes up to 65,504."""
    x = torch.full((4, 64), 8.0, dtype=HALF).to(DEVICE)
    with watching(), sim.installed([make_fault(op="aten::mm", kind="overflow", limit=2048.0)]):
        torch.matmul(x, x.T).sum()


@plant("Torch.matmul.0.forward inf")
def numbers_that_are_too_large(watching: Watching) -> None:
    x = torch.full((4, 64), 80.0, dtype=HALF).to(DEVICE)
    with watching():
        torch.matmul(x, x.T) / 8


@plant("Tensor.mul.0.forward saturated")
def kernel_that_saturates(watching: Watching) -> None:
    """The greatest float16 stands where infinity should."""
    x = torch.tensor([1000.0, 2.0], dtype=HALF).to(DEVICE)
    fault = make_fault(op="aten::mul*", kind="element", index=0, value=torch.finfo(HALF).max)
    with watching(), sim.installed([fault]):
        (x * x).float().sum()


@plant("Functional.margin_ranking_loss.0.forward flagged")
def overflow_that_no_value_shows(watching: Watching) -> None:
    """Inside of the call a difference is infinite, and clamped to zero after that: only the device's flag tells."""
    one, other = (torch.full((2,), sign * 6e4, dtype=HALF).to(DEVICE) for sign in (1, -1))
    with watching():
        F.margin_ranking_loss(one, other, torch.ones_like(one)) + 1


@plant()
def training_with_masks(watching: Watching) -> None:
    work = workload("gpt", DEVICE)
    with watching(work.model):
        work.step()


@plant("Torch.matmul.0.forward inf abnormal")
def attention_of_a_small_gpt(watching: Watching) -> None:
    work = workload("gpt", DEVICE)
    fault = make_fault(op="aten::bmm", kind="overflow", nth=0, direction="forward")
    with watching(work.model), sim.installed([fault]):
        work.step()

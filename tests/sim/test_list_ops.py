"""Ops that change lists of tensors in place pass on a right device, with edge-case inputs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.checks.check import CheckSettings, check_call


@pytest.mark.parametrize("level", ["api", "aten"])
def test_a_list_op_in_place_passes_with_every_variant(tmp_path: Path, npu: str, level: str) -> None:
    """Kernels of the device do not count versions of the tensors in a list."""
    tensors = [torch.randn(6, 4, device=npu, requires_grad=level == "api") for _ in range(2)]
    with (
        tensorprobe.capture(tmp_path / "run", level=level, mode="tensor", in_process=True, stacks=False),
        torch.no_grad(),
    ):
        torch._foreach_mul_(tensors, 0.9)
    (call,) = [call for call in tensorprobe.open_run(tmp_path / "run").calls() if "_foreach_mul_" in call.op]
    found = check_call(call, None, CheckSettings(device=npu, hard=True))
    assert (found.forward, found.message) == ("pass", ""), found
    assert found.backward == ("pass" if level == "api" else "skip")
    assert "non-contiguous" in {one.variant for one in found.details if one.result == "pass"}

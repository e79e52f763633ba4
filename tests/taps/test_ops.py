"""Which functions count as operations, and under which names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.taps.plans import plan_function


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.linear, "Functional.linear"),
        (F.cross_entropy, "Functional.cross_entropy"),
        (torch.matmul, "Torch.matmul"),
        (torch.linalg.norm, "Torch.linalg.norm"),
        (torch.Tensor.add_, "Tensor.add_"),
        (torch.Tensor.__getitem__, "Tensor.__getitem__"),
        (torch._VF.lstm, "VF.lstm"),
        (torch._foreach_add_, "Torch._foreach_add_"),
        (torch._fused_adamw_, "Torch._fused_adamw_"),
        (torch.ops.aten.mm, "Ops.aten.mm"),
        (torch.distributed.all_reduce, "Distributed.all_reduce"),
        (torch.Tensor.size, ""),
        (torch.Tensor.item, ""),
        (torch.Tensor.shape.__get__, ""),  # type: ignore[attr-defined]
    ],
)
def test_canonical_name(function: object, name: str) -> None:
    assert plan_function(function).name == name


@pytest.mark.parametrize("variant", ["foreach", "fused", "single"])
def test_every_form_of_an_optimizer_is_recorded_with_what_it_changes(variant: str, tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    flags = {"foreach": variant == "foreach", "fused": variant == "fused"}
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **flags)
    (parameters[0] * parameters[1]).sum().backward()
    with tensorprobe.capture(tmp_path / "run"):
        optimizer.step()
    last: dict[str, torch.Tensor] = {}
    for call in tensorprobe.open_run(tmp_path / "run").calls():
        for slot in call.outputs:
            last[slot.digest] = slot.tensor()
    found = [any(torch.equal(value, parameter) for value in last.values()) for parameter in parameters]
    assert found == [True, True]

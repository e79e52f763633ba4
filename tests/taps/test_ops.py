"""Which functions count as operations, and under which names."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe import torch_names
from tensorprobe.taps.plans import plan_function


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.linear, "Functional.linear"),
        (F.cross_entropy, "Functional.cross_entropy"),
        (torch.matmul, "Torch.matmul"),
        (torch.mm, "Torch.mm"),
        (torch.hspmm, "Torch.hspmm"),
        (torch.sspaddmm, "Torch.sspaddmm"),
        (torch.sparse.mm, "Torch.sparse.mm"),
        (torch.sparse.sampled_addmm, "Torch.sparse.sampled_addmm"),
        (F.threshold, "Functional.threshold"),
        (F.logsigmoid, "Functional.logsigmoid"),
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


def test_every_function_has_the_name_that_a_user_would_write() -> None:
    homes: dict[str, Any] = {"Torch": torch, "Functional": F, "Tensor": torch.Tensor, "VF": torch._VF}
    wrong = []
    for home, functions in torch_names.overridable_functions().items():
        for function in functions:
            name, own = plan_function(function).name, getattr(function, "__name__", "")
            family, _, path = name.partition(".")
            found = reduce(lambda held, part: getattr(held, part, None), path.split("."), homes.get(family))
            if name and found != function:
                wrong.append(f"{name} is not {own}")
            is_public = not own.startswith("_") and getattr(home, own, None) == function
            if name and is_public and not path.endswith(own) and getattr(homes.get(family), own, None) == function:
                wrong.append(f"{own} is recorded as {name}")
    assert wrong == []


@pytest.mark.parametrize(
    "variant",
    ["foreach", pytest.param("fused", marks=pytest.mark.needs_torch("2.4", "fused AdamW on the CPU")), "single"],
)
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

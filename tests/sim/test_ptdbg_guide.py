"""Ops of torch_npu in a dump of ptdbg_ascend: each is there by its name, without a list of names anywhere."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from ptdbg_ascend import acc_cmp_dump, register_hook, set_dump_path, set_dump_switch
from tensorprobe.legacy.ptdbg import dump
from tensorprobe.sim import npu_ops
from tests.compat.reading import Dump, read_dump
from tests.sim.test_torch_npu import CALLS

OPS = [body.__name__ for body in npu_ops._SCHEMAS]
WITHOUT_GRADIENT = {"npu_one_hot", "npu_sign_bits_pack", "npu_sign_bits_unpack"}
"""What they are given has none."""


@pytest.fixture(scope="module")
def dumped(npu: str, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump of a step that calls every op once, forward and backward."""
    torch_npu = importlib.import_module("torch_npu")
    folder = tmp_path_factory.mktemp("ops")
    model = torch.nn.Linear(6, 6).to(npu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump, "_state", dump._State())
        set_dump_path(folder / "npu_dump.pkl")
        register_hook(model, acc_cmp_dump)
        set_dump_switch("ON", filter_switch="OFF")
        for name in OPS:
            x = model(torch.ones(4, 6, device=npu))
            result = CALLS[name](getattr(torch_npu, name), x)
            outputs = result if isinstance(result, tuple) else (result,)
            differentiable = [output.float().sum() for output in outputs if output.requires_grad]
            if differentiable:
                torch.stack(differentiable).sum().backward()
        status = torch_npu.npu_alloc_float_status(torch.empty(0))
        torch_npu.npu_clear_float_status(torch_npu.npu_get_float_status(status))
        torch_npu.npu_format_cast(torch_npu.one_(torch.zeros(3, device=npu)), 2)
        torch_npu.empty_with_format([2, 3])
        set_dump_switch("OFF")
    return read_dump(folder / "ptdbg_dump_v1.0" / "rank0" / "npu_dump.pkl")


@pytest.mark.parametrize("name", OPS)
def test_an_op_of_torch_npu_is_in_the_dump(dumped: Dump, name: str) -> None:
    lines = [line for line in dumped.lines if line.startswith(f"NPU_{name}_0_")]
    assert f"NPU_{name}_0_forward_input.0" in lines
    assert [line for line in lines if line.startswith(f"NPU_{name}_0_forward_output")]
    has_gradient = f"NPU_{name}_0_backward_input.0" in lines
    assert has_gradient == (name not in WITHOUT_GRADIENT)


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("npu_alloc_float_status", "output"),
        ("npu_get_float_status", "output"),
        ("npu_clear_float_status", "output"),
        ("one_", "output"),
        ("npu_format_cast", "input.0"),
        ("empty_with_format", "input.0.0"),
    ],
)
def test_an_op_that_is_made_of_others_is_there_too(dumped: Dump, name: str, slot: str) -> None:
    assert f"NPU_{name}_0_forward_{slot}" in dumped.lines


def test_memory_that_nobody_has_written_to_is_not_dumped(dumped: Dump) -> None:
    assert "NPU_empty_with_format_0_forward_output" not in dumped.lines


def test_its_values_are_what_it_gave_back(dumped: Dump) -> None:
    given, made = (dumped.lines[f"NPU_fast_gelu_0_forward_{slot}"].array for slot in ("input.0", "output"))
    torch.testing.assert_close(torch.from_numpy(made), npu_ops.fast_gelu(torch.from_numpy(given)))
    assert not list(Path().glob("ptdbg_dump*"))


def test_the_card_of_the_model_is_its_rank(npu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_state", dump._State())
    set_dump_path(tmp_path / "dump.pkl")
    for given, model in (
        ({}, torch.nn.Linear(2, 2).to(f"{npu}:1")),
        ({"rank": 5}, torch.nn.Linear(2, 2).to(f"{npu}:2")),
    ):
        register_hook(model, acc_cmp_dump, **given)
        set_dump_switch("ON")
        model(torch.ones(1, 2, device=model.weight.device)).sum().backward()
        set_dump_switch("OFF")
    for rank in (1, 5):
        lines = read_dump(tmp_path / "ptdbg_dump_v1.0" / f"rank{rank}" / "dump.pkl").lines
        assert "Functional_linear_0_backward_output.1" in lines

"""Canonical names: the spellings of the older tools and the aliases of operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.ops import names
from tensorprobe.ops.names import (
    canonical_call_name,
    canonical_op,
    level_of,
    op_without_prefix,
    parse_call_name,
    without_prefix,
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("Functional.conv2d.0.forward", "Functional.conv2d.0.forward"),
        ("Functional_conv2d_1_forward", "Functional.conv2d.1.forward"),
        ("Functional_max_pool2d_12_backward", "Functional.max_pool2d.12.backward"),
        ("VF_lstm_99_forward", "VF.lstm.99.forward"),
        ("Torch_npu_npu_silu_0_forward", "NPU.npu_silu.0.forward"),
        ("Functional*silu*0", "Functional.silu.0"),
        ("Tensor*__add__*3", "Tensor.add.3"),
        ("Tensor.__iadd__.2.backward", "Tensor.add_.2.backward"),
        ("Torch.lstm.0.forward", "VF.lstm.0.forward"),
        ("_VF.gru.0.forward", "VF.gru.0.forward"),
        ("Torch.conv2d.4.backward", "Functional.conv2d.4.backward"),
        ("Module.layers.0.attn.Attention.forward.0", "Module.layers.0.attn.Attention.forward.0"),
        ("Module_layers.0.attn_Attention_2_backward", "Module.layers.0.attn.Attention.backward.2"),
        ("Module.layers.0", "Module.layers.0"),
        ("Aten.mm.default.7.forward", "Aten.mm.default.7.forward"),
        ("Functional.silu", "Functional.silu"),
        ("Functional.silu.3", "Functional.silu.3"),
        ("anything", "anything"),
    ],
)
def test_canonical_call_name(text: str, canonical: str) -> None:
    assert canonical_call_name(text) == canonical
    assert canonical_call_name(canonical) == canonical


def test_operators_with_their_arguments_in_other_places_stay_apart() -> None:
    for op in ("__rsub__", "__rtruediv__", "__rpow__", "__rmatmul__", "__rfloordiv__", "__rmod__"):
        assert canonical_op(f"Tensor.{op}") == f"Tensor.{op}"
    assert canonical_op("Tensor.__rdiv__") == "Tensor.__rtruediv__"


def test_no_alias_leads_to_another_alias() -> None:
    assert not set(names._ALIASES.values()) & set(names._ALIASES)


def test_what_torch_and_functional_both_hold_is_one_function() -> None:
    same = {
        name
        for name in dir(F)
        if not name.startswith("_") and name.islower() and getattr(torch, name, None) is getattr(F, name)
        if callable(getattr(F, name))
    }
    assert same <= names.ONE_FUNCTION


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__pow__": operator.pow,
    "__matmul__": operator.matmul,
    "__gt__": operator.gt,
    "__le__": operator.le,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__iadd__": operator.iadd,
    "__imul__": operator.imul,
    "__itruediv__": operator.itruediv,
    "__ipow__": operator.ipow,
    "__neg__": lambda x, _: -x,
    "__abs__": lambda x, _: abs(x),
    "__radd__": lambda x, _: 1 + x,
    "__rsub__": lambda x, _: 1 - x,
    "__rdiv__": lambda x, _: 1 / x,
    "__getitem__": lambda x, _: x[0],
}


def test_an_operator_has_the_canonical_name_of_what_capture_calls_it(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", in_process=True):
        for act in OPERATORS.values():
            act(torch.rand(2, 2) + 1, torch.rand(2, 2) + 1)
            torch.full((1,), 0.0)
    captured: list[list[str]] = [[]]
    for call in tensorprobe.open_run(tmp_path / "run").calls():
        if call.op == "Torch.full":
            captured.append([])
        elif call.op != "Torch.rand":
            captured[-1].append(canonical_op(call.op))
    expected = [canonical_op(f"Tensor.{spelling}") for spelling in OPERATORS]
    assert [ops[-1] for ops in captured[:-1]] == expected


def test_parts_of_a_name() -> None:
    assert parse_call_name("Module.a.Linear.backward.3") == ("Module.a.Linear", "3", "backward")
    assert parse_call_name("Torch.nn.init.uniform_.0.forward") == ("Torch.nn.init.uniform_", "0", "forward")


@pytest.mark.parametrize(
    ("path", "prefix", "stripped"),
    [
        ("module.layers.0", "module", "layers.0"),
        ("module", "module", ""),
        ("modules.layers.0", "module", "modules.layers.0"),
        ("layers.module", "module", "layers.module"),
        ("layers.0", None, "layers.0"),
        ("", "module", ""),
    ],
)
def test_prefix_is_taken_from_whole_parts_of_a_path(path: str, prefix: str | None, stripped: str) -> None:
    assert without_prefix(path, prefix) == stripped


def test_only_ops_of_modules_have_a_path() -> None:
    assert op_without_prefix("Module.module.layers.0.Linear", "module") == "Module.layers.0.Linear"
    assert op_without_prefix("Functional.linear", "Functional") == "Functional.linear"


def test_level_of_a_name() -> None:
    named = ["Module.a.B.forward.0", "aten.mm.default.0.forward", "Functional_relu_0_forward"]
    assert [level_of(name) for name in named] == ["module", "aten", "api"]

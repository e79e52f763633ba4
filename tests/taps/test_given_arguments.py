"""An argument keeps the position at which the program passed it, though torch hands it to a mode by keyword."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe
from tensorprobe.record import open_run
from tensorprobe.record.stored import StoredCall

IMAGE, ROWS, LABELS = torch.randn(2, 4, 6, 6), torch.randn(3, 4), torch.tensor([0, 1, 2])
MODULES = [
    (nn.BatchNorm2d(4), (IMAGE,), "batch_norm"),
    (nn.InstanceNorm2d(4, affine=True), (IMAGE,), "instance_norm"),
    (nn.GroupNorm(2, 4), (IMAGE,), "group_norm"),
    (nn.LayerNorm(6), (IMAGE,), "layer_norm"),
    (nn.Dropout(0.1), (ROWS,), "dropout"),
    (nn.Embedding(5, 3), (LABELS,), "embedding"),
    (nn.EmbeddingBag(5, 3), (LABELS, torch.tensor([0, 1])), "embedding_bag"),
    (nn.CrossEntropyLoss(weight=torch.ones(4)), (ROWS, LABELS), "cross_entropy"),
    (nn.BCEWithLogitsLoss(pos_weight=torch.ones(4)), (ROWS, ROWS.sigmoid()), "binary_cross_entropy_with_logits"),
    (nn.MSELoss(), (ROWS, ROWS + 1), "mse_loss"),
    (nn.Softmax(-1), (ROWS,), "softmax"),
    (nn.LeakyReLU(0.2), (ROWS,), "leaky_relu"),
    (nn.ReLU(inplace=True), (ROWS.clone(),), "relu"),
    (nn.MultiheadAttention(4, 2), (ROWS, ROWS, ROWS), "multi_head_attention_forward"),
]


def recorded(run: Path, op: str) -> StoredCall:
    (call,) = [call for call in open_run(run).calls() if call.model.op == op and call.direction == "forward"]
    return call


@pytest.mark.parametrize(("module", "inputs", "name"), MODULES, ids=[name for _, _, name in MODULES])
def test_slots_are_those_that_a_wrapper_of_the_function_sees(
    module: nn.Module, inputs: tuple[Any, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    function = getattr(F, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return function(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(F, name, wrapper)
        module(*inputs)
    with tensorprobe.capture(tmp_path / "run"):
        module(*inputs)
    ((args, kwargs),) = seen
    expected = [f"input.{at}" for at, value in enumerate(args) if isinstance(value, torch.Tensor)]
    expected += [f"input.kwargs.{key}" for key, value in kwargs.items() if isinstance(value, torch.Tensor)]
    call = recorded(tmp_path / "run", f"Functional.{name}")
    assert sorted(slot.name for slot in call.inputs) == sorted(expected)
    assert len(call.model.args or ()) == len(args)


def test_what_is_passed_by_keyword_stays_one(tmp_path: Path) -> None:
    later = functools.partial(F.dropout, p=0.25)
    packed = (ROWS,)
    with tensorprobe.capture(tmp_path / "run"):
        F.layer_norm(ROWS, weight=torch.ones(4), normalized_shape=[4])
        later(ROWS)
        F.elu(*packed)
    layer_norm = recorded(tmp_path / "run", "Functional.layer_norm")
    assert [slot.name for slot in layer_norm.inputs] == ["input.0", "input.kwargs.weight"]
    assert (recorded(tmp_path / "run", "Functional.dropout").model.kwargs or {})["p"] == 0.25
    assert len(recorded(tmp_path / "run", "Functional.elu").inputs) == 1


def test_a_run_that_has_keywords_agrees_with_one_that_has_positions(tmp_path: Path) -> None:
    weight, bias = torch.ones(4), torch.zeros(4)
    with tensorprobe.capture(tmp_path / "a"):
        F.layer_norm(ROWS, [4], weight, bias)
    with tensorprobe.capture(tmp_path / "b"):
        F.layer_norm(ROWS, [4], weight=weight, bias=bias)
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0 and not result.findings
    assert len(result.rows) == 4

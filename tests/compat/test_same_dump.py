"""The same program gives the dump that the published tool gives: names, numbers, slots and parents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msprobe.pytorch import PrecisionDebugger


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(x), 0.1)
        y, _ = self.attention(x, x, x, need_weights=False)
        out: torch.Tensor = self.head(y.mean(1))
        return out


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    settings = {"task": "statistics", "dump_path": "dump", "rank": [], "step": [], "level": "mix"}
    Path("config.json").write_text(json.dumps({**settings, "statistics": {"scope": [], "list": []}}))
    net = Net()
    debugger = PrecisionDebugger(config_path="config.json")
    debugger.start(net)
    F.cross_entropy(net(torch.randn(2, 5, 8)), torch.tensor([0, 1])).backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger._instance = None
    (file,) = Path("dump").rglob("dump.json")
    return json.loads(file.read_text())["data"], json.loads(file.with_name("construct.json").read_text())


def kinds(entries: list[Any]) -> list[str]:
    return [entry if entry is None else entry["type"] for entry in entries]


def test_arguments_are_those_that_were_given(dump: tuple[dict[str, Any], dict[str, Any]]) -> None:
    data, _ = dump
    norm = data["Functional.batch_norm.0.forward"]
    assert kinds(norm["input_args"]) == ["torch.Tensor"] * 5 + ["bool", "float", "float"]
    assert norm["input_kwargs"] == {} and len(norm["output"]) == 1
    assert kinds(data["Functional.dropout.0.forward"]["input_args"]) == ["torch.Tensor", "float"]
    assert data["Functional.cross_entropy.0.forward"]["input_kwargs"] == {}


def test_calls_inside_a_torch_function_do_not_count(dump: tuple[dict[str, Any], dict[str, Any]]) -> None:
    data, _ = dump
    assert data["Functional.linear.0.forward"]["output"][0]["shape"] == [2, 3]
    assert not any(name.startswith("Functional.scaled_dot_product_attention") for name in data)


def test_a_none_among_the_results_is_counted(dump: tuple[dict[str, Any], dict[str, Any]]) -> None:
    data, _ = dump
    assert kinds(data["Functional.multi_head_attention_forward.0.forward"]["output"]) == ["torch.Tensor", None]
    assert kinds(data["Module.attention.MultiheadAttention.forward.0"]["output"]) == ["torch.Tensor", None]


def test_a_parent_is_the_module_that_called(dump: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, parents = dump
    assert parents["Functional.linear.0.forward"] == "Module.head.Linear.forward.0"
    assert (
        parents["Functional.multi_head_attention_forward.0.forward"] == "Module.attention.MultiheadAttention.forward.0"
    )
    assert parents["Functional.dropout.0.forward"] is None
    assert parents["Module.head.Linear.forward.0"] is None


def test_the_optimizer_is_dumped_alike_on_every_device(tmp_path: Path) -> None:
    """On an accelerator an optimizer uses ops on lists of tensors, which the older tools do not wrap."""
    held = {}
    for foreach in (False, True):
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=foreach)
        debugger = PrecisionDebugger(dump_path=tmp_path / str(foreach), task="statistics", level="L1")
        net(torch.ones(1, 3)).sum().backward()
        debugger.start(net)
        optimizer.step()
        debugger.stop()
        PrecisionDebugger._instance = None
        (file,) = (tmp_path / str(foreach)).rglob("dump.json")
        held[foreach] = json.loads(file.read_text())["data"]
    assert any("add_" in name for name in held[False])
    assert not any("_foreach_" in name for name in held[True])

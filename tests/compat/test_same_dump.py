"""The same program gives the dump that the published tool gives: names, numbers, slots and parents."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ptdbg_ascend
import tensorprobe
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch import compare as msprobe_compare
from tensorprobe.legacy.compared.tables import listed, read_lines
from tensorprobe.legacy.ptdbg.compare import STYLE
from tensorprobe.model.reason import Skipped
from tensorprobe.record import open_run


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


def dump_of(tmp_path: Path, step: Callable[[], Any], **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a step leaves in dump.json and construct.json."""
    (tmp_path / "config.json").write_text(json.dumps({"dump_path": str(tmp_path / "dump"), "level": "mix", **settings}))
    debugger = PrecisionDebugger(config_path=tmp_path / "config.json")
    debugger.start()
    step()
    debugger.stop()
    PrecisionDebugger._instance = None
    (file,) = (tmp_path / "dump").rglob("dump.json")
    return json.loads(file.read_text())["data"], json.loads(file.with_name("construct.json").read_text())


def test_the_optimizer_and_clipping_are_parents_of_their_calls(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        (weight * 2).sum().backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=False)
        optimizer.step()
        weight.detach().exp()

    data, parents = dump_of(tmp_path, step)
    assert parents["optimizer"] is None and parents["clip_grad"] is None
    assert {parents[name] for name in data if ".add_." in name} == {"optimizer"}
    assert parents["Torch.vector_norm.0.forward"] == "clip_grad"
    assert parents["Tensor.__mul__.0.forward"] is None and parents["Tensor.exp.0.forward"] is None


class Scaled(nn.Module):
    scale = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = 0.5
        y: torch.Tensor = self.scale * x + x * self.scale + half * x + 1 / x
        return sum([y, -x, abs(x)]).__isub__(x)  # type: ignore[union-attr,return-value]


def test_operators_have_the_names_by_which_python_calls_them(tmp_path: Path) -> None:
    data, _ = dump_of(tmp_path, lambda: Scaled()(torch.ones(2)))
    assert [name for name in data if not name.startswith("Module.")] == [
        "Tensor.__rmul__.0.forward",
        "Tensor.__mul__.0.forward",
        "Tensor.__add__.0.forward",
        "Tensor.__rmul__.1.forward",
        "Tensor.__add__.1.forward",
        "Tensor.reciprocal.0.forward",
        "Tensor.__mul__.1.forward",
        "Tensor.__add__.2.forward",
        "Tensor.__radd__.0.forward",
        "Tensor.__add__.3.forward",
        "Tensor.__add__.4.forward",
        "Tensor.__isub__.0.forward",
    ]


def test_a_function_that_the_program_holds_shows_what_it_calls(tmp_path: Path) -> None:
    activation, x = F.relu, torch.ones(2)
    data, _ = dump_of(tmp_path, lambda: (activation(x), F.relu(x), torch.nn.functional.relu(x)))
    assert [*data] == ["Torch.relu.0.forward", "Functional.relu.0.forward", "Functional.relu.1.forward"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no columns before Python 3.11")
def test_a_condition_among_the_arguments_hides_no_name(tmp_path: Path) -> None:
    x, y = torch.ones(2, 3, 4, 4), torch.rand(2, 3, 4)

    def step() -> None:
        nn.InstanceNorm2d(3)(x)
        F.instance_norm(x if x.shape else y, None, None if x.shape else y)
        F.max_pool2d(x, 2, return_indices=True)
        F.max_pool1d(y, 2 if y.shape else 1, return_indices=True)
        # fmt: off
        (F
         .relu(x if x.shape else y))
        # fmt: on

    data, _ = dump_of(tmp_path, step, level="L1")
    assert [name.removesuffix(".forward") for name in data] == [
        *("Functional.instance_norm.0", "Functional.instance_norm.1"),
        *("Functional.max_pool2d.0", "Functional.max_pool1d.0", "Functional.relu.0"),
    ]


def test_what_only_moves_values_is_dumped_at_risk_level_all(tmp_path: Path) -> None:
    x = torch.ones(2, 3)

    def step() -> None:
        if bool(x.transpose(0, 1).flatten().sum() > 1):
            x.exp()

    focus, _ = dump_of(tmp_path, step)
    assert [*focus] == ["Tensor.sum.0.forward", "Tensor.__gt__.0.forward", "Tensor.exp.0.forward"]
    everything, _ = dump_of(tmp_path, step, risk_level="ALL")
    assert [*everything][:2] == ["Tensor.transpose.0.forward", "Tensor.flatten.0.forward"]
    assert everything["Tensor.__bool__.0.forward"]["output"] == [{"type": "bool", "value": True}]


def test_gradients_stand_in_the_order_of_the_arguments(tmp_path: Path) -> None:
    x, weight, bias = (torch.rand(shape, requires_grad=True) for shape in ((2, 3), (3,), (3,)))
    data, _ = dump_of(tmp_path, lambda: F.layer_norm(x, [3], bias=bias, weight=weight).sum().backward())
    assert [held["shape"] for held in data["Functional.layer_norm.0.backward"]["output"]] == [[2, 3], [3], [3]]
    (file,) = (tmp_path / "dump").rglob("dump.json")
    slots = {slot.name: slot.summary.max for slot in open_run(file).call("Functional.layer_norm.0.backward").outputs}
    assert [*slots] == ["output.0", "output.kwargs.weight", "output.kwargs.bias"] and bias.grad is not None
    assert slots["output.kwargs.bias"] == bias.grad.max().item()


def dump_optimizer(out: Path, *, foreach: bool) -> tuple[Path, Path]:
    """Return two dumps of one training, of msprobe and of ptdbg_ascend; on an accelerator torch would choose `foreach`."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), foreach=foreach)

    def step() -> None:
        net(torch.ones(1, 3).to(torch.float64).float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    debugger = PrecisionDebugger(dump_path=out / "msprobe", task="tensor", level="L1")
    debugger.start(net)
    step()
    debugger.stop()
    PrecisionDebugger._instance = None
    ptdbg_ascend.set_dump_path(str(out / "npu_dump.pkl"))
    ptdbg_ascend.register_hook(net, ptdbg_ascend.acc_cmp_dump)
    ptdbg_ascend.set_dump_switch("ON")
    step()
    step()
    ptdbg_ascend.set_dump_switch("OFF")
    (file,) = (out / "msprobe").rglob("dump.json")
    return file, out / "ptdbg_dump_v1.0"


@pytest.mark.parametrize("layout", ["msprobe", "ptdbg_ascend"])
def test_an_optimizer_on_lists_of_tensors_is_no_difference(layout: str, tmp_path: Path) -> None:
    """On an accelerator an optimizer uses ops on lists of tensors, which the older tools do not wrap."""
    which = ["msprobe", "ptdbg_ascend"].index(layout)
    one, lists = (dump_optimizer(tmp_path / str(foreach), foreach=foreach)[which] for foreach in (False, True))
    assert sum(".lerp_." in entry.name for entry in open_run(one).segment(0, 0).index().entries) == 2 * (1 + which)
    assert not any("_foreach_" in entry.name for entry in open_run(lists).segment(0, 0).index().entries)
    for pair in ((one, lists), (lists, one)):
        result = tensorprobe.compare(*pair, prove="off")
        assert result.exit_code == 0, str(result)
        (reason,) = result.summary.buckets.skipped
        assert reason == Skipped.OTHER_OPTIMIZER
    files = [(path if which == 0 else path / "rank0" / "npu_dump.pkl") for path in (lists, one)]
    compare, key = (msprobe_compare, "json_path") if which == 0 else (ptdbg_ascend.compare, "pkl_path")
    table = compare({f"npu_{key}": str(files[0]), f"bench_{key}": str(files[1])}, str(tmp_path))
    verdicts = {
        row["Accuracy Reached or Not"] for row in csv.DictReader(Path(table).read_text("utf-8-sig").splitlines())
    }
    assert verdicts == {"Yes", "N/A"}
    # The same of a table whose dumps were compared in other processes, so that nobody has read them here.
    unread = [listed(open_run(path), STYLE).segment(0, 0) for path in (one, lists)]
    assert read_lines(*unread).excuse_of("Tensor.lerp_.0.forward", 0) == Skipped.OTHER_OPTIMIZER


def test_a_call_that_the_optimizer_does_not_make_stays_a_difference(tmp_path: Path) -> None:
    for extra in (False, True):
        net = nn.Linear(3, 2)
        with torch.no_grad():
            net.weight.fill_(1.0)
        ptdbg_ascend.set_dump_path(str(tmp_path / str(extra) / "npu_dump.pkl"))
        ptdbg_ascend.register_hook(net, ptdbg_ascend.acc_cmp_dump)
        ptdbg_ascend.set_dump_switch("ON")
        x = torch.ones(2, 3)
        if extra:
            x.mul_(1.0)
        net(x).sum().backward()
        ptdbg_ascend.set_dump_switch("OFF")
    result = tensorprobe.compare(*(tmp_path / str(extra) / "ptdbg_dump_v1.0" for extra in (False, True)), prove="off")
    assert result.exit_code == 1 and result.summary.buckets.only_candidate == 1


class Outside(nn.Module):
    """Results of every kind, in a model that calls a module which is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.packed = Named(), nn.LSTM(4, 4, batch_first=True)
        self.strangers = [nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.named(x, torch.Generator())
        sequence = nn.utils.rnn.pack_padded_sequence(given["y"], [2, 2], batch_first=True)
        result: torch.Tensor = self.strangers[0](self.packed(sequence)[0].data)
        return result.sum()


class Named(nn.Module):
    def forward(self, x: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        return {"y": x * 2, "number": 3, "nothing": None}


def dump_net(net: Any, loss: Callable[[], torch.Tensor], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    debugger = PrecisionDebugger(dump_path=str(folder), task="statistics", level="mix")
    debugger.start(net)
    loss().backward()
    debugger.stop()
    PrecisionDebugger._instance = None
    (file,) = folder.rglob("dump.json")
    return json.loads(file.read_text())["data"], json.loads(file.with_name("construct.json").read_text())


def test_only_modules_inside_the_given_model_are_dumped(tmp_path: Path) -> None:
    net, loss = Outside(), nn.MSELoss()
    x = torch.randn(2, 2, 4, requires_grad=True)
    data, parents = dump_net(net, lambda: loss(net(x), torch.zeros(())), tmp_path / "dump")
    assert {name.split(".")[1] for name in data if name.startswith("Module.")} == {"named", "packed"}
    assert parents["Functional.mse_loss.0.forward"] is parents["Functional.relu.0.forward"] is None


def test_several_models_have_their_numbers_in_the_paths(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))]
    data, parents = dump_net(nets, lambda: nets[1](nets[0](torch.ones(2, 3))).sum(), tmp_path / "dump")
    modules = [name for name in data if name.startswith("Module.") and name.endswith(".forward.0")]
    assert modules == ["Module.0.0.Linear.forward.0", "Module.1.0.Linear.forward.0"]
    assert parents[modules[0]] is None


def test_a_wrapper_is_part_of_the_paths_as_torch_has_them(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Linear(3, 3))
    net = nn.DataParallel(inner)
    data, parents = dump_net(net, lambda: net(torch.ones(2, 3)).sum(), tmp_path / "dump")
    assert {"Module.module.Sequential.forward.0", "Module.module.0.Linear.forward.0"} <= {*data}
    assert parents["Module.module.0.Linear.forward.0"] == "Module.module.Sequential.forward.0"


def test_results_are_dumped_as_they_were_returned(tmp_path: Path) -> None:
    net = Outside()
    x = torch.randn(2, 2, 4, requires_grad=True)
    data, _ = dump_net(net, lambda: net(x), tmp_path / "dump")
    named = data["Module.named.Named.forward.0"]
    assert kinds(named["input_args"]) == ["torch.Tensor", None], "no word for a Generator"
    (held,) = named["output"]
    assert held["number"] == {"type": "int", "value": 3} and held["nothing"] is None and held["y"]["shape"] == [2, 2, 4]
    packed = data["Module.packed.LSTM.forward.0"]
    assert list(packed["input_args"][0]) == ["data", "batch_sizes", "sorted_indices", "unsorted_indices"]
    assert packed["output"][0]["data"]["shape"] == [4, 4] and len(packed["output"][1]) == 2


def test_the_side_of_a_number_is_known_whatever_computes_it(tmp_path: Path) -> None:
    scales, net = {"a": [2.0]}, nn.Linear(2, 2)

    def compute() -> torch.Tensor:
        x = net(torch.ones(2, 2))
        y = math.sqrt(2.0 / math.pi) * (x + 0.5 * torch.pow(x, 3.0))  # rmul, rmul
        y = len(scales) * y * scales["a"][0]  # rmul, mul
        z: Any = 0
        z += y  # radd
        z *= 2.0  # imul
        return (x.shape[0] ** -0.5) * (math.log(3) + z).sum() * x.dim()  # radd, rmul, mul

    data, _ = dump_net(net, compute, tmp_path / "dump")
    found = [name.split(".")[1] for name in data if name.startswith("Tensor.__") and name.endswith("forward")]
    expected = "rmul add rmul rmul mul radd imul radd rmul mul"
    assert sorted(found) == sorted(f"__{name}__" for name in expected.split())

"""Backward entries of msprobe: whose each gradient is, and what the published tool means otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from msprobe.pytorch import PrecisionDebugger
from tensorprobe.record import open_run
from tests.builders.msprobe import Entry, write_dump


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def entries(
    op: str, args: list[Any], kwargs: dict[str, Any], out: torch.Tensor, gradients: list[Any]
) -> dict[str, Entry]:
    """One call as the published tool dumps it: `gradients` are those of the node it hooks."""
    return {
        f"{op}.0.forward": {"input_args": args, "input_kwargs": kwargs, "output": [out]},
        f"{op}.0.backward": {"input": [torch.ones_like(out)], "output": gradients},
    }


def outputs(folder: Path, name: str) -> dict[str, Any]:
    """Slot → the gradient, or why there is none."""
    call = open_run(folder).call(name)
    return {slot.name: slot.skipped or slot.tensor() for slot in call.outputs}


def test_gradients_belong_to_the_arguments_that_a_node_has(tmp_path: Path) -> None:
    x, weight, bias = leaf(3, 4), leaf(4), leaf(4)
    out = F.layer_norm(x, (4,), weight, bias)
    gradients = [*torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))]
    data = entries("Functional.layer_norm", [x, [4], weight, bias, 1e-5], {}, out, gradients)
    found = outputs(write_dump(tmp_path / "dump", data), "Functional.layer_norm.0.backward")
    assert [*found] == ["output.0", "output.2", "output.3"]
    assert all(torch.equal(a, b) for a, b in zip(found.values(), gradients, strict=True))


def test_running_statistics_are_in_no_node(tmp_path: Path) -> None:
    x, weight, bias = leaf(3, 4), leaf(4), leaf(4)
    out = F.batch_norm(x, torch.zeros(4), torch.ones(4), weight, bias, training=True)
    gradients = [*torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))]
    args = [x, torch.zeros(4), torch.ones(4), weight, bias, True]
    data = entries("Functional.batch_norm", args, {}, out, gradients)
    assert [*outputs(write_dump(tmp_path / "dump", data), "Functional.batch_norm.0.backward")] == [
        "output.0",
        "output.3",
        "output.4",
    ]


def test_a_linear_has_its_bias_first_and_its_weight_transposed(tmp_path: Path) -> None:
    x, weight, bias = leaf(3, 4), leaf(5, 4), leaf(5)
    out = F.linear(x, weight, bias)
    by_x, by_weight, by_bias = torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))
    data = entries("Functional.linear", [x, weight, bias], {}, out, [by_bias, by_x, by_weight.t().contiguous()])
    call = open_run(write_dump(tmp_path / "dump", data)).call("Functional.linear.0.backward")
    found = {slot.name: slot for slot in call.outputs}
    assert torch.equal(found["output.0"].tensor(), by_x) and torch.equal(found["output.2"].tensor(), by_bias)
    assert found["output.1"].shape == (5, 4) and not found["output.1"].has_data
    summary = found["output.1"].summary
    assert summary is not None and summary.max == pytest.approx(by_weight.max().item())


@pytest.mark.parametrize(
    ("op", "args", "gradient", "why"),
    [
        ("Functional.cross_entropy", [leaf(2, 3), torch.tensor([0, 1])], torch.ones(2, 3), "last autograd node"),
        ("Functional.linear", [leaf(2, 3, 4), leaf(5, 4)], torch.ones(6, 5), "last autograd node"),
        ("Functional.relu", [leaf(2, 3), True], torch.ones(2, 3), "writes in place"),
        ("Tensor.mul_", [leaf(2, 3), 2.0], torch.ones(2, 3), "writes in place"),
        ("Tensor.__iadd__", [leaf(2, 3), 2.0], torch.ones(2, 3), "writes in place"),
    ],
)
def test_what_the_published_tool_means_otherwise_is_kept_and_never_compared(
    op: str, args: list[Any], gradient: torch.Tensor, why: str, tmp_path: Path
) -> None:
    data = entries(op, args, {}, torch.ones(2, 3), [gradient])
    call = open_run(write_dump(tmp_path / "dump", data)).call(f"{op}.0.backward")
    found = {slot.name: slot for slot in call.outputs}
    assert torch.equal(found["output.node.0"].tensor(), gradient)
    assert why in (found["output.0"].skipped or "") and not found["output.0"].has_data


def test_one_tensor_passed_twice_has_no_gradient_for_each_place(tmp_path: Path) -> None:
    x = leaf(3, 4)
    data = entries("Torch.mul", [x, x], {}, x * x, [x.detach(), x.detach()])
    found = outputs(write_dump(tmp_path / "dump", data), "Torch.mul.0.backward")
    assert "several times" in found["output.0"] and "several times" in found["output.1"]


def test_two_dumps_of_the_published_tool_are_compared_as_they_are(tmp_path: Path) -> None:
    x, target = leaf(2, 3), torch.tensor([0, 1])
    data = entries("Functional.cross_entropy", [x, target], {}, F.cross_entropy(x, target), [torch.ones(2, 3)])
    one = write_dump(tmp_path / "one", data)
    data["Functional.cross_entropy.0.backward"]["output"] = [torch.ones(2, 3) * 1.1]
    other = write_dump(tmp_path / "other", data)
    assert "not measured" not in str(tensorprobe.compare(one, one, prove="off"))
    result = tensorprobe.compare(one, other, prove="off")
    assert result.exit_code == 1 and "Functional.cross_entropy.0.backward" in str(result)


def dump_ours(folder: Path, x: torch.Tensor, net: torch.nn.Module) -> Path:
    debugger = PrecisionDebugger(dump_path=folder, task="tensor", level="mix")
    debugger.start(net)
    F.cross_entropy(net(x), torch.tensor([0, 1])).backward()
    debugger.stop()
    PrecisionDebugger._instance = None
    (file,) = folder.rglob("dump.json")
    return file


@pytest.mark.parametrize("fault", [False, True])
def test_our_dump_agrees_with_the_published_one_of_the_same_call(fault: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.LayerNorm(3))
    x, target = torch.randn(2, 3), torch.tensor([0, 1])
    ours = dump_ours(tmp_path / "ours", x, net)
    weight, bias = net[1].weight, net[1].bias
    assert isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor)
    normed = F.layer_norm(x, (3,), weight, bias)
    logits = normed.detach().requires_grad_()
    (by_logits,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
    gradients = torch.autograd.grad(normed, (weight, bias), by_logits)
    by_weight = gradients[0] * (1.1 if fault else 1)
    call: Entry = {"input_args": [x, [3], weight, bias, 1e-5], "input_kwargs": {}, "output": [normed]}
    parameters = {"weight": weight, "bias": bias}
    published: dict[str, Entry] = {
        "Module.0.Identity.forward.0": {"input_args": [x], "input_kwargs": {}, "parameters": {}, "output": [x]},
        "Functional.layer_norm.0.forward": call,
        "Module.1.LayerNorm.forward.0": {**call, "input_args": [x], "parameters": parameters},
        "Functional.cross_entropy.0.forward": {
            "input_args": [normed, target],
            "input_kwargs": {},
            "output": [F.cross_entropy(logits, target)],
        },
        "Functional.cross_entropy.0.backward": {"input": [torch.tensor(1.0)], "output": [torch.ones(2, 3)]},
        "Functional.layer_norm.0.backward": {"input": [by_logits], "output": [None, by_weight, gradients[1]]},
        "Module.1.LayerNorm.parameters_grad.0": {"weight": [by_weight], "bias": [gradients[1]]},
        "Module.1.LayerNorm.backward.0": {"input": [by_logits], "output": [None]},
        # What the node before it gives, if there is one: Identity makes none.
        "Module.0.Identity.backward.0": {"input": [by_logits], "output": [by_logits if fault else weight, None]},
    }
    result = tensorprobe.compare(write_dump(tmp_path / "published", published), ours, prove="off")
    assert result.exit_code == int(fault), str(result)
    assert result.summary.buckets.skipped == {"recorded by only one of the two tools": 1}
    assert result.summary.buckets.only_baseline == result.summary.buckets.only_candidate == 0
    if fault:
        assert "layer_norm.0.backward" in str(result).splitlines()[0]

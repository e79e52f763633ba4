"""Faults as data, where they apply, and what each kind does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorprobe import sim
from tensorprobe.errors import SettingsError
from tensorprobe.sim import kinds


@pytest.fixture
def x(npu: str) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(npu)


def relu_under(x: torch.Tensor, kind: str, **settings: object) -> torch.Tensor:
    with sim.fault("aten::relu", kind, **settings):
        return torch.relu(x).cpu()


def test_spoiling_kinds(x: torch.Tensor) -> None:
    right = torch.relu(x).cpu()
    assert torch.equal(relu_under(x, "scale", factor=3.0), right * 3)
    assert torch.equal(relu_under(x, "bias", amount=0.5), right + 0.5)
    tail = relu_under(x, "tail", block=3)
    assert torch.equal(tail[:, :-3], right[:, :-3]) and not tail[:, -3:].any()
    assert torch.equal(relu_under(x, "tail", dim=0, block=2, factor=2.0)[-2:], right[-2:] * 2)
    one = relu_under(x, "element", index=11, amount=0.25) - right
    assert one.flatten()[11] == 0.25 and one.count_nonzero() == 1
    swapped = relu_under(x, "swap-rows", first=1, second=4)
    assert torch.equal(swapped[[1, 4]], right[[4, 1]]) and torch.equal(swapped[[0, 2, 3, 5]], right[[0, 2, 3, 5]])
    assert torch.equal(relu_under(x, "roll", by=2), right.roll(2, 0))
    assert relu_under(x, "nan", index=3).isnan().flatten().nonzero().tolist() == [[3]]
    overflowed = relu_under(x, "overflow")
    assert overflowed.isinf().sum() == 1 and overflowed.isinf().flatten().nonzero().item() == right.argmax().item()
    flushed = relu_under(x, "flush-subnormals", threshold=0.5)
    assert torch.equal(flushed, torch.where(right < 0.5, 0.0, right))


def test_rounding_truncates_towards_zero(x: torch.Tensor) -> None:
    right = torch.relu(x).cpu()
    wrong = relu_under(x, "rounding", bits=7)
    assert torch.equal(wrong, wrong.bfloat16().float()), "seven bits of mantissa are bfloat16"
    assert (wrong <= right).all() and not torch.equal(wrong, right.bfloat16().float())


def test_true_subnormals_are_flushed(npu: str) -> None:
    tiny = torch.tensor([1e-39, 1.0, -1e-40]).to(npu)
    with sim.fault("aten::mul", "flush-subnormals"):
        assert (tiny * 1.0).cpu().tolist() == [0.0, 1.0, 0.0]
    assert (tiny * 1.0).cpu()[0] > 0


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_accumulation_in_a_narrow_type_loses_digits(x: torch.Tensor, precision: str) -> None:
    y = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).npu()
    bias = y[0]
    batch = y.view(4, 16, 64)
    weight, image = y.view(-1)[: 2 * 8 * 9].view(2, 8, 3, 3), y.view(1, 8, 16, 32)
    computations = {
        "aten::mm": lambda: y @ y,
        "aten::addmm": lambda: torch.addmm(bias, y, y, alpha=2.0),
        "aten::bmm": lambda: torch.bmm(batch, batch.transpose(1, 2)),
        "aten::sum": lambda: y.sum(1, keepdim=True),
        "aten::mean": lambda: y.mean((0, 1)),
        "aten::convolution_overrideable": lambda: nn.functional.conv2d(image, weight, bias[:2]),
    }
    for op, compute in computations.items():
        right = compute().cpu()
        with sim.fault(op, "accumulate", precision=precision, block=1):
            wrong = compute().cpu()
        assert wrong.shape == right.shape and wrong.dtype == right.dtype
        assert not torch.equal(wrong, right), op
        torch.testing.assert_close(wrong, right, rtol=0.2, atol=0.02 * float(right.abs().max() + 1), msg=op)


def test_accumulate_refuses_ops_it_does_not_know(x: torch.Tensor) -> None:
    with (
        sim.fault("aten::relu", "accumulate"),
        pytest.raises(SettingsError, match=r"not aten::relu\. Try kind 'compute-in'"),
    ):
        torch.relu(x)


def test_compute_in_rounds_inputs_and_results(x: torch.Tensor) -> None:
    with sim.fault("aten::exp", "compute-in", precision="bfloat16"):
        wrong = torch.exp(x).cpu()
    assert torch.equal(wrong, torch.exp(x.cpu().bfloat16().float()).bfloat16().float())
    with sim.fault("aten::exp", "compute-in", precision="int4"), pytest.raises(SettingsError, match="none of float16"):
        torch.exp(x)


def test_stale_gives_the_previous_result(x: torch.Tensor) -> None:
    with sim.fault("aten::relu", "stale", nth=2):
        results = [torch.relu(x + n) for n in range(4)]
    assert torch.equal(results[2], results[1])
    assert torch.equal(results[3], torch.relu(x + 3))


def test_in_place_out_and_foreach_forms_are_spoiled_too(x: torch.Tensor) -> None:
    with sim.fault("aten::add*", "scale", factor=2.0):
        y = torch.ones(3, device="npu")
        y.add_(1)
        out = torch.empty(3, device="npu")
        torch.add(torch.ones(3, device="npu"), 1, out=out)
    assert y.tolist() == out.tolist() == [4.0] * 3
    tensors = [torch.ones(2, device="npu"), torch.ones(2, device="npu")]
    with sim.fault("aten::_foreach_add_", "scale", factor=3.0):
        torch._foreach_add_(tensors, 1)
    assert tensors[0].tolist() == [6.0, 6.0] and tensors[1].tolist() == [2.0, 2.0]
    with sim.fault("aten::_foreach_add_", "scale", factor=3.0, output=None):
        torch._foreach_add_(tensors, 1)
    assert tensors[1].tolist() == [9.0, 9.0]


def test_selection_by_count_dtype_direction_and_probability(x: torch.Tensor) -> None:
    def hits(**settings: object) -> list[int]:
        with sim.fault("aten::relu", "bias", amount=1.0, **settings):
            return [n for n in range(6) if not torch.equal(torch.relu(x).cpu(), torch.relu(x.cpu()))]

    assert hits() == [0, 1, 2, 3, 4, 5]
    assert hits(nth=2) == [2]
    assert hits(since=4) == [4, 5]
    assert hits(dtype="float16") == []
    assert hits(dtype="float32", nth=0) == [0]
    assert hits(direction="backward") == []
    assert hits(rank=1) == []
    some = hits(probability=0.5, seed=3)
    assert 0 < len(some) < 6 and some == hits(probability=0.5, seed=3) and some != hits(probability=0.5, seed=5)


def test_selection_by_module_forward_and_backward(npu: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4)), nn.GELU()).to(npu)
    x = torch.randn(2, 4).to(npu)
    with sim.fault("aten::gelu", "scale", module="1.*") as inner:
        model(x)
    assert (inner.seen, inner.fired) == (1, 1)
    with sim.fault("aten::mm", "scale", module="1.1", direction="backward") as products:
        model(x).sum().backward()
    assert products.fired == 2, "one product for the weight, one for the input"
    with sim.fault("aten::addmm", "scale", module="nowhere") as nowhere:
        model(x)
    assert nowhere.seen == 0


def test_gradient_leaves_forward_alone(npu: str) -> None:
    x = torch.ones(3, device=npu, requires_grad=True)
    with sim.fault("aten::mul", "gradient", factor=0.5):
        y = x * 4
        y.sum().backward()
    assert y.tolist() == [4.0] * 3 and x.grad.tolist() == [2.0] * 3


def test_two_faults_on_one_op_add_up(x: torch.Tensor) -> None:
    with sim.fault("aten::relu", "scale", factor=2.0), sim.fault("aten::relu", "bias", amount=1.0):
        assert torch.equal(torch.relu(x).cpu(), torch.relu(x.cpu()) * 2 + 1)


WRONG = [
    ({"op": "aten::mm", "kind": "scael"}, "Did you mean 'scale'"),
    ({"op": "aten::mm", "kind": "scale", "facter": 1}, "has no parameter 'facter'.*Did you mean 'factor'"),
    ({"op": "aten::mm", "kind": "scale", "modul": "x"}, "Did you mean 'module'"),
    ({"op": "aten::mm", "kind": "scale", "nth": "first"}, "Expected `int"),
    ({"op": "aten::mm", "kind": "scale", "direction": "sideways"}, "Invalid enum value"),
    ({"op": "aten::mm", "kind": "scale", "probability": 2}, "between 0 and 1"),
    ({"kind": "scale"}, "needs 'op'"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_mistakes_are_explained(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        sim.make_fault(**settings)


def test_faults_are_read_from_json_toml_names_and_text(tmp_path: Path) -> None:
    fault = sim.make_fault(op="aten::mm", kind="tail", block=4, nth=3, module="blocks.*")
    assert sim.read_faults(sim.write_faults([fault])) == [fault]
    (tmp_path / "f.json").write_text(json.dumps({"fault": [fault.as_dict()]}))
    (tmp_path / "f.toml").write_text(
        '[[fault]]\nop = "aten::mm"\nkind = "tail"\nblock = 4\nnth = 3\nmodule = "blocks.*"\n'
    )
    assert sim.read_faults(str(tmp_path / "f.json")) == sim.read_faults(str(tmp_path / "f.toml")) == [fault]
    assert [one.op for one in sim.read_faults("softmax-tail,gelu-truncated")] == ["aten::_softmax", "aten::gelu"]
    for text, message in (
        ("softmax-tial", "Did you mean 'softmax-tail'"),
        ("[{]", "cannot read the faults"),
        ("[3]", "a table or a list of tables"),
        (str(tmp_path / "none.toml"), "does not exist"),
    ):
        with pytest.raises(SettingsError, match=message):
            sim.read_faults(text)


def test_every_kind_is_described() -> None:
    assert {"scale", "bias", "accumulate", "rounding", "flush-subnormals", "tail", "element", "swap-rows"} <= set(
        kinds.KINDS
    )
    assert {"stale", "overflow", "nan", "gradient", "nondeterminism", "drop-contribution", "error"} <= set(kinds.KINDS)
    assert all(kind.__doc__ for kind in kinds.KINDS.values())


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, tensorprobe.sim, tensorprobe.sim.known_faults; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.usefixtures("warm_processes")
def test_the_environment_makes_a_script_faulty() -> None:
    code = (
        "import torch; from tensorprobe import sim; sim.enable('npu');"
        "print(torch.softmax(torch.zeros(8, device='npu'), 0).sum().item())"
    )
    for value, expected in (("softmax-tail", 0.5), ("", 1.0)):
        environment = {"TENSORPROBE_SIM_FAULTS": value, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert float(done.stdout) == expected

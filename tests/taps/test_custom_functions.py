"""The program's own `torch.autograd.Function` classes are calls: recorded, compared and replayed, and never disturbed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorprobe
from tensorprobe import torch_names
from tensorprobe.taps.custom_functions import RUNNER

_slope = 2.0


class Square(torch.autograd.Function):
    """Has the constant as an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _slope * ctx.factor * x * gradient, None


class Twice(torch.autograd.Function):
    """Can be used under functorch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


BOUND = Square.apply


def square(*args: Any) -> Any:
    return Square.apply(*args)


def _train(folder: Path, square: Any = square, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with tensorprobe.capture(folder, model=model, in_process=True, **settings):
        square(model(torch.randn(3, 4)), 3.0).sum().backward()
    return tensorprobe.open_run(folder)


def _names(run: Any) -> list[str]:
    return [call.name for call in run.calls(step=0, rank=0)]


IN_PYTHON = pytest.mark.skipif(torch_names.APPLIES_IN_C, reason="needs torch 2.13 or older: apply in Python")


@pytest.mark.parametrize("apply", [square, pytest.param(BOUND, marks=IN_PYTHON)], ids=["named", "bound before"])
@pytest.mark.parametrize("level", ["api", "mix"])
def test_function_is_a_call_with_its_gradients(level: str, apply: Any, tmp_path: Path) -> None:
    run = _train(tmp_path / "run", apply, level=level)
    calls = {call.name: call for call in run.calls(step=0, rank=0)}
    forward, backward = calls["Function.Square.0.forward"], calls["Function.Square.0.backward"]
    assert calls["Tensor.mul.0.forward"].parent == forward.name
    x, y = (slot.tensor() for slot in forward.slots)
    coming, going = (slot.tensor() for slot in backward.slots)
    assert torch.equal(y, x * x * 3)
    assert torch.equal(going, 2 * 3 * x * coming)


def test_aten_calls_inside_a_function_are_attributed_as_before(tmp_path: Path) -> None:
    calls = list(_train(tmp_path / "run", level="aten").calls(step=0, rank=0))
    assert [call.parent for call in calls if call.op == "Aten.mul.Tensor"][:2] == [
        "Tensor.mul.0.forward",
        "Tensor.mul.1.forward",
    ]


def test_nothing_is_left_installed(tmp_path: Path) -> None:
    before = RUNNER.__dict__.get("apply")
    with tensorprobe.capture(tmp_path / "run", in_process=True):
        assert RUNNER.__dict__["apply"] is not before
        assert pickle.loads(pickle.dumps(Square)) is Square
    assert RUNNER.__dict__.get("apply") is before
    assert square(torch.ones(2), 1.0).tolist() == [1.0, 1.0]


def test_functions_of_torch_stay_unseen(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with tensorprobe.capture(tmp_path / "run", in_process=True):
        checkpoint(lambda t: square(t, 2.0).sin(), x, use_reentrant=True).sum().backward()
    names = {name.rsplit(".", 2)[0] for name in _names(tensorprobe.open_run(tmp_path / "run"))}
    assert {name for name in names if name.startswith("Function.")} == {"Function.Square"}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch.compile does that itself
def test_functorch_and_compile_work_as_without_a_probe(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda t: Square.apply(t, 2.0).sin(), backend="aot_eager")
    with tensorprobe.capture(tmp_path / "run", in_process=True):
        gradient = torch.func.grad(lambda t: Twice.apply(t).sum())(x)
        mapped = torch.func.vmap(Twice.apply)(x)
        found = compiled(x)
    assert torch.equal(gradient, torch.full_like(x, 2.0))
    assert torch.equal(mapped, 2 * x)
    assert torch.equal(found, (x * x * 2).sin())


def test_exception_of_the_function_reaches_the_program(tmp_path: Path) -> None:
    x = torch.ones(2)
    with tensorprobe.capture(tmp_path / "run", in_process=True), pytest.raises(TypeError, match="factor"):
        Square.apply(x)
    (call,) = tensorprobe.open_run(tmp_path / "run").calls(step=0, rank=0)
    assert (call.name, call.raised) == ("Function.Square.0.forward", "TypeError")


def test_compare_names_the_function_whose_formula_for_the_gradient_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(tmp_path / "a")
    assert tensorprobe.compare(tmp_path / "a", tmp_path / "a").exit_code == 0
    monkeypatch.setattr("tests.taps.test_custom_functions._slope", 2.1)
    _train(tmp_path / "b")
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert "Tensor.mul.2" in str(result)  # the call of the formula that has another constant, inside the function


def test_precheck_runs_the_function_where_its_module_is_imported(tmp_path: Path) -> None:
    _train(tmp_path / "run")
    result = tensorprobe.precheck(tmp_path / "run", calls=["Function.*"], imports=[__name__], jobs=0)
    (check,) = result.checks
    assert (check.call, check.forward, check.backward) == ("Function.Square.0.forward", "pass", "pass")


def test_audit_says_that_the_calls_inside_are_checked(tmp_path: Path) -> None:
    _train(tmp_path / "run")
    result = tensorprobe.audit(tmp_path / "run", jobs=1)  # in a process that has not imported this module
    assert result.exit_code == 0
    assert "has not imported: the calls inside it are checked" in str(result)

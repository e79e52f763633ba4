"""Where the border of different calls lies: precision, factors around a product, empty masks, gradients, modules that are not called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorprobe
from tests.e2e.test_meeting_places import Between, Scaled, compare

Step = Callable[[Tensor], Tensor]


class Narrow(nn.Module):
    """Two layers under autocast, or without it; what they make is float32 in the end."""

    def __init__(self, on: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.on, self.factor = on, factor
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.on):
            made = self.two(torch.tanh(self.one(x)))
        return torch.square((made.float() if self.on else made) * self.factor)


def test_a_cast_of_the_narrower_side_is_judged_by_what_it_reads(tmp_path: Path) -> None:
    result = compare(tmp_path / "right", lambda: Narrow(False), lambda: Narrow(True))
    assert result.exit_code == 0, str(result)
    wrong = compare(tmp_path / "wrong", lambda: Narrow(False), lambda: Narrow(True, 1.2))
    assert wrong.exit_code == 1, str(wrong)


def scores(x: Tensor, *, before: float = 1.0, behind: float = 1.0) -> Tensor:
    """Scale one of the operands of a product, or its result."""
    y = (x * before if before != 1 else x) @ x.mT
    return torch.softmax(y * behind if behind != 1 else y, -1) @ x


def test_a_factor_may_stand_on_either_side_of_a_product(tmp_path: Path) -> None:
    def ours() -> nn.Module:
        return Between(lambda x: scores(x, behind=0.3))

    result = compare(tmp_path / "right", ours, lambda: Between(lambda x: scores(x, before=0.3)))
    assert result.exit_code == 0 and not result.summary.buckets.only_candidate, str(result)
    wrong = compare(tmp_path / "wrong", ours, lambda: Between(lambda x: scores(x, before=0.303)))
    found = wrong.divergence
    assert found is not None and found.region is not None, str(wrong)
    assert any("matmul" in name for name in found.region.baseline) and any(
        "mul" in name for name in found.region.candidate
    )


def test_a_factor_that_nothing_makes_up_for_is_named_alone(tmp_path: Path) -> None:
    result = compare(tmp_path, lambda: Between(scores), lambda: Between(lambda x: scores(x, before=1.01)))
    found = result.divergence
    assert found is not None and found.region is not None, str(result)
    assert not found.region.baseline and all("mul" in name for name in found.region.candidate)


def test_a_mask_that_masks_nothing_belongs_to_the_call_that_reads_it(tmp_path: Path) -> None:
    def by_hand(x: Tensor) -> Tensor:
        return torch.where(x > 100, x, torch.log1p(torch.exp(x)))

    result = compare(tmp_path, lambda: Between(F.softplus), lambda: Between(by_hand))
    assert result.exit_code == 0 and not result.summary.buckets.only_candidate, str(result)


def test_a_wrong_gradient_in_a_function_that_one_program_has_begins_there(tmp_path: Path) -> None:
    """The call inside its backward computes from a gradient, and is no part of the forward."""
    result = compare(tmp_path, lambda: Between(torch.tanh), lambda: Between(lambda x: Scaled.apply(torch.tanh(x))))
    found = result.divergence
    assert found is not None and found.region is not None and found.region.begins, str(result)
    assert any("Scaled" in name for name in found.region.candidate)


class Tower(nn.Module):
    """A layer that is called, or whose weights are used."""

    def __init__(self, called: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.called, self.factor = called, factor
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) if self.called else F.linear(x, self.one.weight * self.factor, self.one.bias)
        return self.two(torch.relu(y))


def test_a_module_that_one_program_calls_is_compared_by_what_is_around_it(tmp_path: Path) -> None:
    right = compare(tmp_path / "right", lambda: Tower(True), lambda: Tower(False), level="module")
    assert right.exit_code == 0 and not right.summary.buckets.only_baseline, str(right)
    wrong = compare(tmp_path / "wrong", lambda: Tower(True), lambda: Tower(False, 1.01), level="module")
    assert wrong.exit_code == 1 and wrong.divergence is not None, str(wrong)
    assert wrong.divergence.call.startswith("Module.")


class Stretched(torch.autograd.Function):
    """Its input; the gradient of it is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Layer(nn.Linear):
    stretched = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Stretched.apply(self.weight) if self.stretched else self.weight, self.bias)


class Renamed(nn.Module):
    """One layer and an activation, in a module of a given name. The gradient of its weight may be wrong."""

    def __init__(self, name: str, activation: type[nn.Module] = nn.GELU, stretched: bool = False) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(Layer(8, 4), activation()))
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.stretched = stretched

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = next(self.children())(x)
        return result


def test_a_renamed_module_agrees_where_all_that_it_makes_does(tmp_path: Path) -> None:
    def renamed(name: str, *changes: Any) -> tensorprobe.Result:
        return compare(tmp_path / name, lambda: Renamed("blocks"), lambda: Renamed("layers", *changes), level="module")

    assert renamed("right").exit_code == 0
    wrong = renamed("activation", nn.ReLU)
    assert wrong.exit_code == 1
    assert wrong.divergence is not None and wrong.divergence.call == "Module.Renamed.forward.0", str(wrong)
    assert "with the same result" not in str(wrong), str(wrong)
    assert renamed("gradient", nn.GELU, True).exit_code == 1, "no module around shows the gradient of a weight"


class Projections(nn.Module):
    """One projection for queries, keys and values, or three with the same numbers."""

    def __init__(self, fused: bool, factor: float = 1.0) -> None:
        super().__init__()
        whole = nn.Linear(16, 48)
        self.factor, self.out, self.head = factor, nn.Linear(16, 16), nn.Linear(16, 4)
        if fused:
            self.qkv = whole
        else:
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            for part, weight, bias in zip(self.parts, whole.weight.chunk(3), whole.bias.chunk(3), strict=True):
                part.weight.data.copy_(weight), part.bias.data.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (part(x) for part in self.parts)
        return self.head(torch.tanh(self.out(torch.softmax(q @ k.mT * self.factor, -1) @ v)))


def trained(out: Path, rate: float = 1e-3, **choices: Any) -> Path:
    torch.manual_seed(0)
    model = Projections(**choices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    with tensorprobe.capture(out, model=model, in_process=True, steps_by="optimizer"):
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(2, 5, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def test_one_projection_and_three_are_one_region_with_their_updates(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", fused=True)
    result = tensorprobe.compare(one, trained(tmp_path / "three", fused=False), prove="off")
    buckets = result.summary.buckets
    assert result.exit_code == 0 and not buckets.only_baseline and not buckets.only_candidate, str(result)
    wrong = tensorprobe.compare(one, trained(tmp_path / "hot", fused=False, factor=1.01), prove="off")
    assert wrong.divergence is not None and "mul" in wrong.divergence.call, str(wrong)
    other = tensorprobe.compare(trained(tmp_path / "rate", fused=False, rate=1.02e-3), one, prove="off")
    found = other.divergence
    assert found is not None and found.region is not None and found.region.name == "Region.optimizer.0", str(other)

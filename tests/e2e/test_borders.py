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


def angles() -> Tensor:
    return torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])


def rotated_whole(x: Tensor) -> Tensor:
    """Rotate pairs of numbers: all of the tensor times a cosine, and its halves, exchanged, times a sine."""
    both = torch.cat((angles(), angles()), -1)
    return x * both.cos() + torch.cat((-x[..., 2:], x[..., :2]), -1) * both.sin()


def rotated_halves(x: Tensor, slip: float = 1.0) -> Tensor:
    """The same, half by half: `cat` puts together what is computed."""
    cos, sin = angles().cos(), angles().sin()
    one, other = x[..., :2], x[..., 2:]
    return torch.cat((one * cos - other * sin, slip * (other * cos + one * sin)), -1)


class Rotating(nn.Module):
    def __init__(self, rotate: Step) -> None:
        super().__init__()
        self.rotate, self.q, self.k = rotate, nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.rotate(made.unflatten(-1, (-1, 4)).transpose(1, 2)) for made in (self.q(x), self.k(x)))
        return torch.softmax(q @ k.mT, -1)


def test_a_call_that_puts_together_other_parts_is_no_meeting_place(tmp_path: Path) -> None:
    """One program puts a view beside what it computed, the other one two results. Their gradients are other parts too."""

    def rotates(rotate: Step) -> Callable[[], nn.Module]:
        return lambda: Rotating(rotate)

    result = compare(tmp_path / "right", rotates(rotated_whole), rotates(rotated_halves))
    assert result.exit_code == 0, str(result)
    wrong = compare(tmp_path / "wrong", rotates(rotated_whole), rotates(lambda x: rotated_halves(x, 1.01)))
    found = wrong.divergence
    assert found is not None and found.region is not None, str(wrong)
    assert any("cat" in name for name in (*found.region.baseline, *found.region.candidate))


class Placed(nn.Module):
    """Add a table's rows to what is read, and attend to what came before."""

    def __init__(self, by_hand: bool, begin: int = 2) -> None:
        super().__init__()
        self.by_hand, self.begin = by_hand, begin
        self.places, self.norm, self.act = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            x = self.norm(x + self.places(torch.arange(6) + self.begin))
            return self.act(F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1.0))
        here = torch.arange(6) + 0
        late = here[None] > here[:, None]
        place = torch.cumsum(torch.ones(6, dtype=torch.int64), 0) - 1
        x = self.norm(x + self.places(place + self.begin))
        return self.act(torch.softmax((x @ x.mT).masked_fill(late, -torch.inf), -1) @ x)


def test_constants_that_are_made_for_another_purpose_are_no_pair(tmp_path: Path) -> None:
    """One program counts for its mask, the other one for its places; what is computed from places meets again."""
    result = compare(tmp_path / "right", lambda: Placed(True), lambda: Placed(False))
    assert result.exit_code == 0, str(result)
    wrong = compare(tmp_path / "wrong", lambda: Placed(True), lambda: Placed(False, 1))
    found = wrong.divergence
    assert found is not None and found.region is not None, str(wrong)
    assert any("cumsum" in name for name in found.region.baseline), str(wrong)
    assert not any("softmax" in name for name in found.region.baseline), str(wrong)


def weighed(x: Tensor, *, first: float = 1.0, second: float = 1.0, behind: float = 1.0) -> Tensor:
    """A product of what two calls make, element by element, with a factor in one of three places."""
    one, other = torch.sin(x), torch.cos(x)
    made = (one / first if first != 1 else one) * (other * second if second != 1 else other)
    return made * behind if behind != 1 else made


def scored(x: Tensor, *, first: float = 1.0, second: float = 1.0) -> Tensor:
    one, other = torch.sin(x), torch.cos(x)
    made = (one / first if first != 1 else one) @ (other * second if second != 1 else other).transpose(-1, -2)
    return torch.softmax(made, -1) @ x


def test_a_factor_may_stand_at_either_operand_of_a_product(tmp_path: Path) -> None:
    for name, ours, right, wrong in (
        ("elements", {"first": -1.0}, {"second": -1.0}, {"second": -1.01}),
        ("behind", {"first": 2.0}, {"behind": 0.5}, {"behind": 0.505}),
    ):
        for other, code in ((right, 0), (wrong, 1)):
            result = compare(
                tmp_path / name / str(code),
                lambda ours=ours: Between(lambda x: weighed(x, **ours)),  # type: ignore[misc]
                lambda other=other: Between(lambda x: weighed(x, **other)),  # type: ignore[misc]
            )
            assert result.exit_code == code, f"{name}: {result}"
        found = result.divergence
        assert found is not None and found.region is not None and any("mul" in n for n in found.region.candidate)


def test_a_factor_may_stand_at_either_matrix_with_a_view_between(tmp_path: Path) -> None:
    for factor, code in ((0.5, 0), (0.505, 1)):
        result = compare(
            tmp_path / str(code),
            lambda: Between(lambda x: scored(x, first=2.0)),
            lambda factor=factor: Between(lambda x: scored(x, second=factor)),  # type: ignore[misc]
        )
        assert result.exit_code == code, str(result)
    found = result.divergence
    assert found is not None and found.region is not None and any("matmul" in n for n in found.region.candidate)


class Normed(nn.Module):
    """A norm by hand with weights of one, which make the same numbers again; a copy lies between."""

    def __init__(self, fused: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.fused, self.eps = fused, eps
        self.one, self.two, self.weight = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.fused:
            x = F.rms_norm(x, (8,), self.weight, self.eps)
        else:
            x = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        made: Tensor = self.two(x)
        return made


def test_numbers_that_a_region_makes_twice_are_no_input_of_it(tmp_path: Path) -> None:
    assert compare(tmp_path / "right", lambda: Normed(False), lambda: Normed(True)).exit_code == 0
    result = compare(tmp_path / "wrong", lambda: Normed(False), lambda: Normed(True, 1e-2))
    found = result.divergence
    assert found is not None and found.region is not None and found.region.begins, str(result)
    assert any("rms_norm" in name for name in found.region.candidate)

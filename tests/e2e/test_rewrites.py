"""A model and its rewrite, with other names, transposed weights and functions of their own, meet with a suggested map."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorprobe
from tensorprobe.engine import suggest_map
from tensorprobe.engine.result import Result


class Straight(nn.Module):
    """Multiplies by its weight as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view_as(x)


class Hub(nn.Module):
    """Two layers of attention that share a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.h = nn.ModuleList(
            nn.ModuleDict({"ln": nn.LayerNorm(8), "proj": Straight(8), "out": Straight(8)}) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)
        for layer in self.h:
            y = layer["proj"](layer["ln"](x))
            y = torch.softmax(y @ y.mT / 8**0.5 + mask, -1) @ y
            x = x + layer["out"](y)
        return x


def silu_by_hand(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class _Silu(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @classmethod
    def backward(cls, ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * s * (1 + cls.factor * x * (1 - s))


class _WrongSilu(_Silu):
    factor = 1.01


class Own(nn.Module):
    """The same with other names, in another order, and fused attention."""

    def __init__(self, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__()
        hub, self.scales = Hub(), scales
        self.outs = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gains = nn.ParameterList(layer["ln"].weight for layer in hub.h)  # type: ignore[index]
        self.shifts = nn.ParameterList(layer["ln"].bias for layer in hub.h)  # type: ignore[index]
        self.ins = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.tokens = hub.table
        for mine, name in ((self.ins, "proj"), (self.outs, "out")):
            for linear, layer in zip(mine, hub.h, strict=True):
                linear.weight.data = layer[name].weight.data.t().contiguous()  # type: ignore[index]
                linear.bias.data = layer[name].bias.data.clone()  # type: ignore[index]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for inner, out, gain, shift, scale in zip(
            self.ins, self.outs, self.gains, self.shifts, self.scales, strict=True
        ):
            y = inner(F.layer_norm(x, (8,), gain, shift))
            x = x + out(F.scaled_dot_product_attention(y, y, y, is_causal=True, scale=scale / 8**0.5))
        return x


class Gate(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act, self.table, self.head = act, nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(self.act(self.table(ids)))
        return made


def compared(tmp_path: Path, *models: Any, mapped: bool = True, **options: Any) -> Result:
    for name, build in zip("ab", models, strict=True):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        with tensorprobe.capture(tmp_path / name, model=model, in_process=True, stacks=False):
            model(torch.arange(10).view(2, 5)).square().mean().backward()
            optimizer.step()
    runs = tmp_path / "a", tmp_path / "b"
    if mapped:
        (tmp_path / "names.map").write_text(suggest_map(*runs))
        options["map"] = tmp_path / "names.map"
    return tensorprobe.compare(*runs, prove="off", threads=1, **options)


def test_a_rewrite_agrees_with_a_suggested_map(tmp_path: Path) -> None:
    result = compared(tmp_path, Hub, Own)
    assert result.exit_code == 0, str(result)
    assert not [note for note in result.summary.notes if "pairs no calls" in note]
    updated = {row.slot for row in result.rows if row.slot.startswith("output.parameter ")}
    assert {f"output.parameter h.{at}.proj.weight" for at in (0, 1)} <= updated, "transposed, and compared"
    assert {f"output.parameter h.{at}.ln.weight" for at in (0, 1)} <= updated, "a parameter of another module"


@pytest.mark.parametrize("layer", [0, 1])
def test_layers_that_share_a_mask_are_regions_of_their_own(layer: int, tmp_path: Path) -> None:
    result = compared(tmp_path, Hub, partial(Own, (1.02, 1.0) if layer == 0 else (1.0, 1.02)))
    assert result.divergence is not None
    assert result.divergence.region is not None
    named = [name for name in result.divergence.region.candidate if "attention" in name and "forward" in name]
    assert named == [f"Functional.scaled_dot_product_attention.{layer}.forward"]


def test_a_parameter_that_is_updated_in_another_order_is_no_difference(tmp_path: Path) -> None:
    def turned() -> nn.Module:
        model = Hub()
        model._modules = dict(reversed(model._modules.items()))
        return model

    assert compared(tmp_path, Hub, turned, mapped=False).exit_code == 0


def test_a_function_of_the_program_is_judged_by_what_it_calls(tmp_path: Path) -> None:
    right = compared(tmp_path / "right", partial(Gate, silu_by_hand), partial(Gate, _Silu.apply), mapped=False)
    assert right.exit_code == 0, str(right)
    wrong = compared(tmp_path / "wrong", partial(Gate, F.silu), partial(Gate, _WrongSilu.apply), mapped=False)
    assert wrong.divergence is not None
    assert wrong.divergence.region is not None
    assert "Functional.silu.0.backward" in wrong.divergence.region.baseline

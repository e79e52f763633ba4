"""Where two programs meet again: gradients that autograd adds up, memory that is filled in place, ATen ops, buffers, defaults."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe
from tensorprobe.errors import OtherLayout
from tensorprobe.model import Call, Slot, Summary
from tensorprobe.pairing.optimizers import pair_optimizers
from tests.builders.runs import call, write, write_manifest

Step = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Two layers with a step between them."""

    def __init__(self, step: Step, *, act: Step = F.silu) -> None:
        super().__init__()
        self.step, self.act = step, act
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(self.act(self.step(self.one(x))))
        return made


def record(out: Path, model: Callable[[], nn.Module], shape: tuple[int, ...] = (3, 6, 8), **settings: Any) -> Path:
    torch.manual_seed(0)
    made = model()
    with tensorprobe.capture(out, model=made, in_process=True, **settings):
        made(torch.randn(shape)).sum().backward()
    return out


def compare(tmp_path: Path, ours: nn.Module | Any, theirs: Any, **settings: Any) -> tensorprobe.Result:
    runs = record(tmp_path / "a", ours, **settings), record(tmp_path / "b", theirs, **settings)
    return tensorprobe.compare(*runs, prove="off")


START, END = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2]), torch.tensor([1, 2, 3, 4, 5, 0, 3, 5])


def add_by_index(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(1, END, x.index_select(1, START))


def add_by_matrix(x: Tensor) -> Tensor:
    matrix = torch.zeros(6, 6)
    matrix.index_put_((END, START), torch.ones(8), accumulate=True)
    return matrix @ x


def test_a_matrix_that_is_filled_in_place_is_a_step_on_the_way(tmp_path: Path) -> None:
    result = compare(tmp_path, lambda: Between(add_by_index), lambda: Between(add_by_matrix))
    assert result.exit_code == 0, str(result)
    assert result.summary.buckets.in_regions


def test_an_error_behind_such_a_matrix_is_named(tmp_path: Path) -> None:
    result = compare(tmp_path, lambda: Between(add_by_index), lambda: Between(add_by_matrix, act=F.gelu))
    found = result.divergence
    assert found is not None and found.region is not None
    assert any("silu" in name for name in found.region.baseline), str(result)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.01


def norm_in_groups(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (2, -1))
    centred = parts - parts.mean(-1, keepdim=True)
    return (centred / torch.sqrt(parts.var(-1, keepdim=True, unbiased=False) + 1e-5)).flatten(-2)


def fused_norm(x: Tensor) -> Tensor:
    return F.group_norm(x.flatten(0, 1), 2).view_as(x)


def test_a_wrong_gradient_of_calls_that_use_a_tensor_twice_begins_there(tmp_path: Path) -> None:
    """Autograd adds up the gradients of a tensor that is read twice. No call makes the sum, and a view of it is made later."""

    def wrong(x: Tensor) -> Tensor:
        return Scaled.apply(norm_in_groups(x))

    assert compare(tmp_path / "right", lambda: Between(fused_norm), lambda: Between(norm_in_groups)).exit_code == 0
    result = compare(tmp_path / "wrong", lambda: Between(fused_norm), lambda: Between(wrong))
    begun = [region for region in result.summary.regions if region.begins]
    assert begun and any("group_norm" in name for name in begun[0].baseline), str(result)


class Layers(nn.Module):
    def __init__(self, kernel: torch.nn.attention.SDPBackend) -> None:
        super().__init__()
        self.kernel = kernel
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            with torch.nn.attention.sdpa_kernel(self.kernel):
                x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x


def test_aten_ops_of_two_layers_are_in_regions_of_their_own(tmp_path: Path) -> None:
    """Their numbers count forward and backward apart: equal numbers link nothing."""
    kernels = torch.nn.attention.SDPBackend
    result = compare(tmp_path, lambda: Layers(kernels.FLASH_ATTENTION), lambda: Layers(kernels.MATH), level="aten")
    assert result.exit_code == 0, str(result)
    flash = [
        sum("flash_attention_for_cpu.default" in name for name in region.baseline) for region in result.summary.regions
    ]
    assert sorted(flash, reverse=True)[:3] == [1, 1, 1]


class Buffered(nn.Module):
    def __init__(self, rate: float, step: Step) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("rates", rate * torch.arange(1.0, 9.0))
        self.one = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.one(self.step(x)) * self.rates.to(x.dtype)
        return made


def test_a_differing_buffer_is_named_although_earlier_calls_have_no_partner(tmp_path: Path) -> None:
    result = compare(tmp_path, lambda: Buffered(1.0, F.silu), lambda: Buffered(1.01, lambda x: x * torch.sigmoid(x)))
    found = result.divergence
    assert found is not None and found.entered is not None, str(result)
    assert found.entered.name == "rates"


def test_defaults_that_only_one_program_passes_are_no_difference(tmp_path: Path) -> None:
    def short(x: Tensor) -> Tensor:
        return F.layer_norm(torch.add(F.gelu(x), x), (8,)).softmax(-1)

    def long(x: Tensor) -> Tensor:
        x = torch.add(F.gelu(x, approximate="none"), x, alpha=1)
        return F.layer_norm(x, (8,), weight=None, eps=1e-5).softmax(-1, dtype=None)

    result = compare(tmp_path / "same", lambda: Between(short), lambda: Between(long))
    assert result.exit_code == 0 and not result.findings, str(result)
    result = compare(
        tmp_path / "other", lambda: Between(F.gelu), lambda: Between(lambda x: F.gelu(x, approximate="tanh"))
    )
    assert [finding.detail for finding in result.findings] == ["kwarg approximate: absent → 'tanh'"]


def test_a_gradient_of_zeros_is_read_by_the_optimizer(tmp_path: Path) -> None:
    """Its bytes are those of every new state. It is listed all the same: what differs in the update follows from it."""
    zeros = Summary(0.0, 0.0, 0.0, 0.0)

    def slot(name: str, digest: str, role: str = "") -> Slot:
        summary = zeros if digest == "0" else Summary(1.0, 0.5, 0.7, 1.4)
        return Slot(name, "float32", (3,), digest=digest, role=role, summary=summary)

    def optimizer(gradient: str, op: str) -> list[Call | None]:
        state = "optimizer state exp_avg of w"
        return [
            Call("Torch.zeros_like.0.forward", phase="optimizer", slots=(slot("output.0", "0", state),)),
            Call(
                f"{op}.0.forward",
                phase="optimizer",
                slots=(
                    slot("input.0", "1", "parameter w"),
                    slot("input.1", gradient, "gradient w"),
                    slot("input.2", "0", state),
                    slot("output.0", f"2{gradient}", "parameter w"),
                    slot("output.changed.2", f"3{gradient}", state),
                ),
            ),
        ]

    ours, theirs = optimizer("7", "Tensor.addcdiv_"), optimizer("0", "Torch._foreach_addcdiv_")
    found = pair_optimizers((ours, theirs), [(0, 0)], ([1], [1]), "Region.optimizer.0.forward")
    assert found is not None
    assert "input.gradient w" in [slot.name for slot in found.parts[0][0].slots]


def _split(root: Path, width: int, ranks: int, off: float = 0.0) -> Path:
    """A module whose weight is split over the ranks, between two modules that are whole on each."""
    draw = np.random.default_rng(0)
    x, y, hidden = (draw.normal(size=(4, 8)).astype(np.float32) for _ in range(3))
    calls = [
        call("Module.one.Linear.forward.0", inputs=[x], outputs=[y]),
        call("Module.up.Linear.forward.0", inputs=[y], outputs=[hidden[:, :width]]),
        call("Module.two.Norm.forward.0", inputs=[y], outputs=[x + off]),
    ]
    write(root, calls)
    write_manifest(root, world_size=ranks)
    return root


def test_modules_with_equal_shapes_are_compared_in_another_layout(tmp_path: Path) -> None:
    whole = _split(tmp_path / "one", 8, 1)
    result = tensorprobe.compare(whole, _split(tmp_path / "two", 4, 2), prove="off")
    assert result.exit_code == 0, str(result)
    assert any(finding.kind == "shape" for finding in result.findings)
    result = tensorprobe.compare(whole, _split(tmp_path / "wrong", 4, 2, off=0.1), prove="off")
    assert result.exit_code == 1 and result.divergence is not None
    assert result.divergence.call == "Module.two.Norm.forward.0"
    assert tensorprobe.compare(whole, _split(tmp_path / "same", 4, 1), prove="off").exit_code == 1


class Shifted(TorchDispatchMode):
    """A device whose gelu is 2 % too large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            made = func(*args, **(kwargs or {}))
            return made * 1.02 if func is torch.ops.aten.gelu.default else made


def in_parts(
    out: Path, parts: int, kind: Any, off: float = 1.0, device: Any = contextlib.nullcontext, **options: Any
) -> Path:
    """Train on whole batches, or on the halves of one of two processes that average their gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    optimizer = kind(model.parameters(), **options)
    batches = torch.randn(2, 16, 8)
    with tensorprobe.capture(out, model=model, in_process=True, steps_by="optimizer"):
        for batch in batches:
            mine, rest = batch[: 16 // parts], batch[16 // parts :]
            with device():
                model(mine).square().mean().backward()
            if parts > 1:
                with torch._C.DisableTorchFunction():  # what the other process does
                    others = torch.autograd.grad(model(rest).square().mean(), list(model.parameters()))
                    for parameter, other in zip(model.parameters(), others, strict=True):
                        assert parameter.grad is not None
                        parameter.grad.add_(other).mul_(off / 2)
            optimizer.step()
            optimizer.zero_grad()
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"world_size": parts}))
    return out


SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({"kind": torch.optim.SGD, "lr": 0.1}, {}),
    "AdamW": ({"kind": torch.optim.AdamW, "foreach": False}, {"foreach": True}),
}


@pytest.mark.parametrize("name", SHARED)
def test_processes_that_share_a_batch_meet_one_process_in_the_optimizer(name: str, tmp_path: Path) -> None:
    ours, theirs = SHARED[name]
    runs = in_parts(tmp_path / "one", 1, **ours), in_parts(tmp_path / "two", 2, **(ours | theirs))
    result = tensorprobe.compare(*runs, prove="off")
    assert result.exit_code == 0, str(result)
    assert any("what is whole in both was" in note for note in result.summary.notes)


@pytest.mark.parametrize("name", SHARED)
def test_what_processes_that_share_a_batch_do_wrong_is_named(name: str, tmp_path: Path) -> None:
    ours, theirs = SHARED[name]
    whole = in_parts(tmp_path / "one", 1, **ours)
    result = tensorprobe.compare(whole, in_parts(tmp_path / "off", 2, off=1.01, **(ours | theirs)), prove="off")
    found = result.divergence
    assert found is not None and found.entered is not None, str(result)
    assert (found.step, found.entered.kind) == (0, "gradient")
    result = tensorprobe.compare(whole, in_parts(tmp_path / "rate", 2, **(ours | theirs | {"lr": 0.11})), prove="off")
    assert result.exit_code == 1 and result.divergence is not None and result.divergence.step == 0, str(result)


def test_a_wrong_kernel_on_a_part_of_the_batch_is_proved(tmp_path: Path) -> None:
    whole = in_parts(tmp_path / "one", 1, torch.optim.SGD, lr=0.1)
    part = in_parts(tmp_path / "two", 2, torch.optim.SGD, lr=0.1, device=Shifted)
    result = tensorprobe.compare(whole, part)
    assert result.divergence is not None and result.divergence.call == "Functional.gelu.0.forward", str(result)


def test_another_part_of_the_batch_is_no_divergence_and_no_agreement(tmp_path: Path) -> None:
    runs = [record(tmp_path / str(batch), lambda: Between(F.relu), shape=(batch, 6, 8)) for batch in (4, 2)]
    manifest = json.loads((runs[1] / "manifest.json").read_text())
    (runs[1] / "manifest.json").write_text(json.dumps(manifest | {"world_size": 2}))
    with pytest.raises(OtherLayout, match="world size is 1 in the baseline and 2 in the candidate"):
        tensorprobe.compare(*runs, prove="off")

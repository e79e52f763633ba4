"""Two programs that compute one model with different calls agree; an error in, at or behind what differs is named there."""

from __future__ import annotations

import math
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
from tests.builders.runs import call, write

WIDTH, HEADS, TOKENS = 32, 4, 50

Step = Callable[..., Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return F.softmax(scores.masked_fill(future, float("-inf")), -1) @ v


def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    future = torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores + future, -1), v)


def attend_hot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.01 / math.sqrt(q.shape[-1]))


def attend_with_wrong_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1
    q.register_hook(lambda gradient: gradient * 1.01)
    return attend_fused(q, k, v)


def attend_with_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.contiguous(), k.clone(), v).contiguous().clone()


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


def norm_with_large_eps(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return norm_by_hand(x, weight, bias, 1e-3)


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_scaled(x: Tensor) -> Tensor:
    return gelu_by_hand(x) * 1.001


def swish_gate(x: Tensor) -> Tensor:
    return F.silu(x) * (x + 1)


def swish_gate_by_hand(x: Tensor) -> Tensor:
    """The first product has the shape of the one in `swish_gate`, and is another."""
    return (x + 1) * x * torch.sigmoid(x)


def swish_gate_off(x: Tensor) -> Tensor:
    return (x + 1) * x * torch.sigmoid(1.01 * x)


def relu_in_place(x: Tensor) -> Tensor:
    return x.relu_()


def residual(x: Tensor, more: Tensor) -> Tensor:
    return x + more


def residual_scaled(x: Tensor, more: Tensor) -> Tensor:
    return x + more * 1.001


def residual_dropped(x: Tensor, more: Tensor) -> Tensor:
    return more


class Block(nn.Module):
    def __init__(self, steps: dict[str, Step]) -> None:
        super().__init__()
        self.steps = steps
        self.weights = nn.ParameterList([*(1 + 0.1 * torch.randn(2, WIDTH))])
        self.biases = nn.ParameterList([*(0.1 * torch.randn(2, WIDTH))])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps, (batch, length, _) = self.steps, x.shape
        heads = self.qkv(steps["norm"](x, self.weights[0], self.biases[0])).view(batch, length, 3, HEADS, -1)
        y = steps["attend"](*heads.permute(2, 0, 3, 1, 4).unbind(0))
        x = steps["residual"](x, self.out(y.transpose(1, 2).reshape(batch, length, -1)))
        return x + self.down(steps["act"](self.up(steps["norm"](x, self.weights[1], self.biases[1]))))


DEFAULT: dict[str, Any] = {
    "norm": norm,
    "attend": attend,
    "act": F.gelu,
    "residual": residual,
    "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "clip": None,
}


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def train(out: Path, **choices: Any) -> Path:
    chosen = DEFAULT | choices
    torch.manual_seed(0)
    blocks = Block(chosen), Block(chosen)
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))
    optimizer = chosen["optimizer"](model.parameters())
    generator = torch.Generator().manual_seed(1)
    with tensorprobe.capture(out, model=model, steps_by="optimizer"):
        for _ in range(2):
            tokens = torch.randint(TOKENS, (4, 16), generator=generator)
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
            if chosen["clip"] is not None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=chosen["clip"])
            optimizer.step()
            optimizer.zero_grad()
    return out


HEALTHY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attention": ({}, {"attend": attend_fused}),
    "einsum": ({"attend": attend_fused}, {"attend": attend_einsum}),
    "copies": ({}, {"attend": attend_with_copies}),
    "norm": ({}, {"norm": norm_by_hand}),
    "gelu": ({}, {"act": gelu_by_hand}),
    "in place": ({"act": torch.relu}, {"act": relu_in_place}),
    "all": ({}, {"attend": attend_fused, "norm": norm_by_hand, "act": gelu_by_hand, "optimizer": adamw(fused=True)}),
    "clip": ({"clip": False}, {"clip": True}),
}
HEALTHY["all"][0]["optimizer"] = adamw(foreach=False)
for _name, _options in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
    HEALTHY[f"AdamW {_name}"] = ({"optimizer": adamw(foreach=False)}, {"optimizer": adamw(**_options)})
HEALTHY["gate"] = ({"act": swish_gate}, {"act": swish_gate_by_hand})
HEALTHY["clip and optimizer"] = (
    {"clip": False, "optimizer": adamw(foreach=False)},
    {"clip": True, "optimizer": adamw(fused=True)},
)
for _kind in (
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adafactor,
):
    HEALTHY[f"{_kind.__name__} foreach"] = (
        {"optimizer": lambda parameters, kind=_kind: kind(parameters, lr=1e-3, foreach=False)},
        {"optimizer": lambda parameters, kind=_kind: kind(parameters, lr=1e-3, foreach=True)},
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_different_calls_with_the_same_result_agree(name: str, tmp_path: Path) -> None:
    runs = [train(tmp_path / side, **choices) for side, choices in zip("ab", HEALTHY[name], strict=True)]
    result = tensorprobe.compare(*runs, prove="auto" if name == "all" else "off")
    assert result.exit_code == 0, str(result)
    comparison = result.summary
    assert all("all explained" in result.render(form) for form in ("text", "md"))
    assert comparison.regions
    assert all(region.agrees for region in comparison.regions)
    assert comparison.buckets.only_baseline == comparison.buckets.only_candidate == 0
    assert comparison.buckets.in_regions == sum(region.calls for region in comparison.regions)


def test_strict_counts_explained_structure(tmp_path: Path) -> None:
    runs = [train(tmp_path / side, **choices) for side, choices in zip("ab", HEALTHY["gelu"], strict=True)]
    result = tensorprobe.compare(*runs, prove="off", strict=True)
    assert result.exit_code == 1 and not result and result.agrees
    assert "strict: " in str(result) and "differ in structure" in str(result)
    assert tensorprobe.compare(runs[0], runs[0], strict=True)


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "inside attention": ({}, {"attend": attend_hot}, "scaled_dot_product_attention"),
    "in a gradient of attention": ({}, {"attend": attend_with_wrong_gradient}, "scaled_dot_product_attention"),
    "inside a norm": ({}, {"norm": norm_with_large_eps}, "layer_norm"),
    "inside an activation": ({}, {"act": gelu_scaled}, "gelu"),
    "inside a gate": ({"act": swish_gate}, {"act": swish_gate_off}, "silu"),
    "a factor behind attention": ({}, {"attend": attend_fused, "residual": residual_scaled}, "mul"),
    "a dropped sum": ({}, {"residual": residual_dropped}, "add"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_in_different_calls_is_named_there(name: str, tmp_path: Path) -> None:
    ours, theirs, op = FAULTS[name]
    result = tensorprobe.compare(train(tmp_path / "a", **ours), train(tmp_path / "b", **theirs), prove="off")
    divergence = result.divergence
    assert divergence is not None, str(result)
    regions = [region for region in result.summary.regions if region.begins]
    named = [name for region in regions[:1] for name in (*region.baseline, *region.candidate)]
    assert any(op in each for each in named), str(result)
    assert divergence.call in named or divergence.candidate_call in named


def test_different_calls_that_are_right_by_themselves_are_another_formula(tmp_path: Path) -> None:
    result = tensorprobe.compare(train(tmp_path / "a"), train(tmp_path / "b", attend=attend_hot))
    assert result.divergence is not None and result.divergence.region_proof is not None
    proof = result.divergence.region_proof
    assert proof.right > 3 and not proof.wrong and not proof.unproved, str(result)
    assert "the formula differs, not a kernel" in str(result)


class WrongSoftmax(TorchDispatchMode):
    """The last element of each softmax is lost."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the tap would see it as a call of the program
            made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default:
            made[..., -1] = 0
        return made


def test_a_wrong_kernel_in_different_calls_is_named(tmp_path: Path) -> None:
    with WrongSoftmax():
        wrong = train(tmp_path / "b")
    result = tensorprobe.compare(train(tmp_path / "a", attend=attend_fused), wrong)
    assert result.divergence is not None and result.divergence.region_proof is not None
    assert result.divergence.region_proof.wrong == ["candidate Functional.softmax.0.forward"], str(result)
    assert "wrong by itself (float64 replay): Functional.softmax.0.forward of the candidate" in str(result)


def dropping(out: Path, seed: int, act: Step = F.gelu, drop: Step = F.dropout) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    x = torch.randn(64, WIDTH)
    torch.manual_seed(seed)
    with tensorprobe.capture(out, model=model, in_process=True):
        model[1](act(drop(model[0](x)))).square().sum().backward()
    return out


def test_another_mask_of_dropout_is_named_as_another_random_stream(tmp_path: Path) -> None:
    result = tensorprobe.compare(dropping(tmp_path / "a", 1), dropping(tmp_path / "b", 2))
    first = result.divergence
    assert result.exit_code == 1 and first is not None and first.random
    assert first.call == "Functional.dropout.0.forward"
    assert "another random stream, by its law on both sides" in str(result)
    assert result.summary.statuses["introduced"] == 1


def test_a_wrong_call_behind_another_mask_of_dropout_is_named(tmp_path: Path) -> None:
    with WrongSoftmax():
        wrong = dropping(tmp_path / "b", 2, lambda x: F.softmax(x, -1))
    result = tensorprobe.compare(dropping(tmp_path / "a", 1, lambda x: F.softmax(x, -1)), wrong)
    assert result.divergence is not None and result.divergence.call == "Functional.softmax.0.forward", str(result)
    assert any("Functional.dropout.0.forward drew other random numbers" in note for note in result.summary.notes)


def test_dropout_that_breaks_its_law_is_no_random_stream(tmp_path: Path) -> None:
    def leaking(x: Tensor) -> Tensor:
        with Leak():
            return F.dropout(x)

    result = tensorprobe.compare(dropping(tmp_path / "a", 1), dropping(tmp_path / "b", 2, drop=leaking))
    first = result.divergence
    assert first is not None and not first.random and first.proof is not None and first.proof.candidate_wrong


class Leak(TorchDispatchMode):
    """Dropout scales what it keeps by 2 % too much."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            made = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.div_:  # the mask, by the share that is kept
                made.mul_(1.02)
        return made


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("fault", [{"betas": (0.91, 0.999)}, {"eps": 1e-4}, {"weight_decay": 0.5}], ids=str)
def test_an_optimizer_of_another_kind_with_an_error_is_named(
    options: dict[str, Any], fault: dict[str, Any], tmp_path: Path
) -> None:
    runs = (
        train(tmp_path / "a", optimizer=adamw(foreach=False)),
        train(tmp_path / "b", optimizer=adamw(**options, **fault)),
    )
    result = tensorprobe.compare(*runs, prove="off")
    assert result.exit_code == 1
    assert result.divergence is not None
    assert result.divergence.step == 0, str(result)
    assert any("lerp_" in name for region in result.summary.regions if region.begins for name in region.baseline)
    assert result.divergence.row is not None
    assert result.divergence.row.slot.startswith(("output.parameter ", "output.optimizer state "))


def test_statistics_that_a_norm_by_hand_keeps_are_compared_by_name(tmp_path: Path) -> None:
    def record(out: Path, momentum: float | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        with tensorprobe.capture(out, model=model, in_process=True):
            x = model[0](torch.randn(8, 4))
            kept = model[1]
            if momentum is None:
                x = F.batch_norm(x, kept.running_mean, kept.running_var, kept.weight, kept.bias, True)
            else:
                mean, variance = x.mean(0), x.var(0, unbiased=False)
                kept.running_var.mul_(1 - momentum).add_(x.detach().var(0), alpha=momentum)
                kept.running_mean.mul_(1 - momentum).add_(mean.detach(), alpha=momentum)
                x = (x - mean) * torch.rsqrt(variance + kept.eps) * kept.weight + kept.bias
            model[2](x).sum().backward()
        return out

    fused, right, wrong = (record(tmp_path / str(each), each) for each in (None, 0.1, 0.11))
    assert tensorprobe.compare(fused, right, prove="off").exit_code == 0
    result = tensorprobe.compare(fused, wrong, prove="off")
    assert result.exit_code == 1 and result.divergence is not None and result.divergence.region is not None
    assert any("batch_norm" in name for name in result.divergence.region.baseline)


def test_what_only_one_program_writes_is_not_explained(tmp_path: Path) -> None:
    """A running mean of the weights, between two steps, that the other program does not keep."""

    def averaging(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)
        optimizer = torch.optim.SGD(held, lr=1e-2, foreach=True)
        means = [parameter.detach().clone() for parameter in held]
        optimizer.register_step_post_hook(
            lambda *_: [mean.lerp_(parameter.detach(), 0.1) for mean, parameter in zip(means, held, strict=True)]
        )
        return optimizer

    plain = train(tmp_path / "a", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, foreach=False))
    result = tensorprobe.compare(plain, train(tmp_path / "b", optimizer=averaging), prove="off")
    assert result.exit_code == 1
    assert any("lerp_" in finding.call for finding in result.findings)


def test_a_wrong_update_of_a_parameter_that_only_different_calls_read_is_found(tmp_path: Path) -> None:
    """The weights of a norm that one program fuses and the other writes by hand: no pair of calls reads them."""

    def uneven(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)
        groups = [{"params": held[:1] + held[2:]}, {"params": held[1:2], "lr": 2e-2}]
        return torch.optim.SGD(groups, lr=1e-2, foreach=True)

    even = train(tmp_path / "a", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, foreach=False))
    result = tensorprobe.compare(
        even, train(tmp_path / "b", norm=norm_by_hand, optimizer=uneven), prove="off", steps=[0]
    )
    assert result.exit_code == 1, str(result)


def test_a_file_may_hold_names_of_regions(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=4).astype(np.float32)
    calls = [
        call("Region.x.7.forward", inputs=[x], outputs=[x + 1]),
        call("Region.0.forward", inputs=[x + 1], outputs=[x + 2]),
        call("Torch.sin.0.forward", inputs=[x + 2], outputs=[x + 3]),
    ]
    more = call("Torch.neg.0.forward", inputs=[x + 2], outputs=[-x])
    one, other = write(tmp_path / "a", calls), write(tmp_path / "b", [*calls, more])
    assert tensorprobe.compare(one, one).exit_code == 0
    summary = tensorprobe.compare(one, other, prove="off").summary
    assert summary.buckets.paired == 3 and summary.exit_code == 1

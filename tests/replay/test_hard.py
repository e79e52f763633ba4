"""Hard inputs find what ordinary ones do not, blame nothing healthy, and say what they pass over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorprobe.model import Call
from tensorprobe.model.precheck import CallCheck
from tensorprobe.replay import runs
from tensorprobe.replay.hard import VARIANTS
from tensorprobe.replay.once import Replay
from tests.checks.planting import DEVICE, HALF, check, record, record_one

torch.manual_seed(0)


def variants_of(found: CallCheck, result: str) -> set[str]:
    return {one.variant for one in found.details if one.result == result}


def step() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    y = F.layer_norm(F.linear(x, w), (16,))
    y = F.softmax(F.gelu(y), -1) + x.exp() - torch.sqrt(x.abs() + 1)
    z, _ = torch.sort(y, -1)
    F.cross_entropy(torch.cat([z, torch.topk(y, 4).values], 1), torch.randint(0, 20, (8,))).backward()


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF])
def test_healthy_ops_pass_with_every_variant(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        calls = record(tmp_path / "run", step)
    finally:
        torch.set_default_dtype(torch.float32)
    for call in calls:
        found = check(call, device=device, hard=True)
        assert "fail" not in (found.forward, found.backward), found.message


def test_each_variant_has_rows_of_its_own(tmp_path: Path) -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    call = record_one(tmp_path / "run", lambda: F.linear(x.requires_grad_(), w.requires_grad_()), "linear")
    found = check(call, hard=True)
    assert variants_of(found, "pass") == {"", *VARIANTS}
    for variant in VARIANTS:
        rows = [one for one in found.details if one.variant == variant]
        assert {(one.direction, one.slot) for one in rows} == {
            ("forward", "output.0"), ("backward", "output.0"), ("backward", "output.1"),
        }  # fmt: skip
    assert variants_of(check(call), "pass") == {""}


def test_what_means_nothing_to_an_op_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    p, target = torch.rand(20), torch.rand(20)
    call = record_one(tmp_path / "a", lambda: F.binary_cross_entropy(p, target), "binary_cross_entropy")
    found = check(call, hard=True)
    assert found.forward == "pass" and found.message == ""
    (row,) = [one for one in found.details if one.variant == "offset"]
    assert row.result == "skip" and row.message.startswith("offset: it raises on the reference too")
    call = record_one(tmp_path / "b", lambda: torch.add(torch.arange(9), 1), "add")
    found = check(call, hard=True)
    assert variants_of(found, "skip") == set(VARIANTS) - {"non-contiguous"}
    call = record_one(tmp_path / "c", lambda: torch.log(torch.rand(9)), "log")
    (row,) = [one for one in check(call, hard=True).details if one.variant == "subnormals"]
    assert row.result == "skip" and "output.0 is not a number" in row.message


def test_numbers_that_are_places_are_not_made_so_large_that_memory_is_left(tmp_path: Path) -> None:
    """With a reflected border and numbers near the largest, torch's own kernel reads outside of its memory and dies."""
    x, grid = torch.randn(2, 3, 5, 20, requires_grad=True), torch.rand(2, 13, 10, 2, requires_grad=True)
    sampled = record_one(
        tmp_path / "a", lambda: F.grid_sample(x, grid, padding_mode="reflection", align_corners=False), "grid_sample"
    )
    whole = record_one(tmp_path / "b", lambda: torch.randn(9).to(torch.int64), "to")
    for call in (sampled, whole):
        found = check(call, hard=True)
        assert found.forward == "pass"
        (row,) = [one for one in found.details if one.variant == "near-overflow"]
        assert row.result == "skip" and "no integer is as large" in row.message


def test_random_ops_have_no_variants(tmp_path: Path) -> None:
    call = record_one(tmp_path / "run", lambda: F.dropout(torch.randn(20, 20)), "dropout")
    assert variants_of(check(call, hard=True), "pass") == {""}


def naive_variance(replay: Replay, x: torch.Tensor) -> torch.Tensor:
    """As a kernel in one pass computes it: the mean of squares less the square of the mean."""
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(variance + 1e-5)


def without_subnormals(replay: Replay, x: torch.Tensor) -> torch.Tensor:
    found = replay.outputs["output.0"]
    return torch.where(found.abs() < torch.finfo(found.dtype).tiny, torch.zeros_like(found), found)


def without_shift(replay: Replay, x: torch.Tensor) -> torch.Tensor:
    """Softmax that does not take off the maximum."""
    return x.exp() / x.exp().sum(-1, keepdim=True)


def by_address(replay: Replay, x: torch.Tensor) -> torch.Tensor:
    """A kernel that takes its input for contiguous."""
    return torch.tanh(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


@pytest.mark.parametrize(
    ("op", "kernel", "variants"),
    [
        ("layer_norm", naive_variance, {"offset"}),
        ("neg", without_subnormals, {"subnormals"}),
        ("softmax", without_shift, {"near-overflow", "offset"}),
        ("tanh", by_address, {"non-contiguous"}),
    ],
)
def test_a_kernel_that_is_wrong_at_the_edge_is_flagged_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, kernel: Any, variants: set[str]
) -> None:
    x = torch.randn(8, 64)
    programs = {
        "layer_norm": lambda: F.layer_norm(x, (64,)),
        "neg": lambda: torch.neg(x),
        "softmax": lambda: F.softmax(x, -1),
        "tanh": lambda: torch.tanh(x),
    }
    call = record_one(tmp_path / "run", programs[op], op)

    class Wrong(Replay):
        def __init__(self, call: Call, inputs: Mapping[str, torch.Tensor], **where: Any) -> None:
            super().__init__(call, inputs, **where)
            if where.get("device") == DEVICE:
                self.outputs = {"output.0": kernel(self, inputs["input.0"])}

    monkeypatch.setattr(runs, "Replay", Wrong)
    assert check(call).forward == "pass"
    found = check(call, hard=True)
    assert found.forward == "fail"
    assert variants_of(found, "fail") == variants
    assert all(part.split(":")[0] in variants for part in found.message.split("; "))

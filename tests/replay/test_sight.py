"""The first look at a recorded result: what it settles, what it leaves to the full evidence."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.checks import check as checks
from tensorprobe.replay import evidence, recorded, runs
from tensorprobe.replay.sight import is_equal, opinion_at_sight

EPS = torch.finfo(torch.float32).eps
CALLS = 7


def record(folder: Path) -> Path:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    with tensorprobe.capture(folder, level="api", in_process=True) as probe:
        (F.linear(x, weight) * 0.1).tanh().sum().backward()
        weight.detach().mul_(0.99998)
        probe.step()
    return folder


def test_right_and_wrong_values() -> None:
    wide = torch.linspace(1, 2, 100, dtype=torch.float64)
    rounded = wide.float()
    found = opinion_at_sight("Torch.mul", wide, rounded)
    assert found is not None and found.judged_by == "relative_l2"
    assert 0 < found.measured <= found.allowed < 3 * EPS
    assert opinion_at_sight("Torch.mul", wide, rounded * (1 + 4 * EPS)) is None
    wrong = rounded.clone()
    wrong[7] = torch.inf
    assert opinion_at_sight("Torch.mul", wide, wrong) is None
    assert opinion_at_sight("Torch.mul", wide.float().double(), rounded) == ("different", 0.0, 0.0)


def test_a_mask_hides_no_error_of_the_other_elements() -> None:
    wide = torch.tensor([-3e38, -3e38, 1.0, 2.0], dtype=torch.float64)
    assert opinion_at_sight("Torch.add", wide, wide.float() + torch.tensor([0.0, 0.0, 0.0, 0.5])) is None


def test_a_rounded_constant_is_no_trend_in_float32_but_one_in_bfloat16() -> None:
    wide = torch.linspace(1, 2, 4096, dtype=torch.float64)
    assert opinion_at_sight("Torch.mul", wide, (wide * (1 + 0.3 * EPS)).float()) is not None
    half = (wide * (1 + 0.3 * torch.finfo(torch.bfloat16).eps)).bfloat16()
    assert opinion_at_sight("Torch.mul", wide, half) is None


def test_sums_that_nearly_cancel_are_astray_by_chance_but_not_other_ops() -> None:
    torch.manual_seed(0)
    wide = torch.randn(100_000, dtype=torch.float64)
    noisy = (wide + EPS * torch.randn_like(wide)).float()
    assert opinion_at_sight("Torch.matmul", wide, noisy) is not None
    assert opinion_at_sight("Torch.mul", wide, noisy) is None


def test_equal_values() -> None:
    one = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])
    assert is_equal(one.t().contiguous().t(), one.clone())
    assert not is_equal(one, torch.tensor([[1.0, torch.nan], [0.0, 3.0]]))
    assert not is_equal(one, one.double()) and not is_equal(one, one[0])


def test_what_was_replayed_is_freed_though_no_backward_followed(tmp_path: Path) -> None:
    """Values that the forward saved are looked up in the replay, and its graph must not keep it alive for that."""
    call = next(one for one in tensorprobe.open_run(record(tmp_path / "run")).calls() if one.op == "Tensor.tanh")
    found, _ = runs.prepare(call, runs.Conditions("cpu", "real", "noise-aware", recorded=True))
    found.check_forward()
    output = weakref.ref(found.reference.outputs["output.0"])
    assert output() is not None
    del found
    gc.collect()
    assert output() is None


def test_a_clearly_right_call_runs_only_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    class Counted(runs.Replay):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            ran.append(kwargs["precision"])
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(runs, "Replay", Counted)
    result = tensorprobe.audit(record(tmp_path / "run"), jobs=0)
    assert result.exit_code == 0 and result.summary.passed == len(result.checks) == CALLS
    assert ran == ["double"] * CALLS


def test_the_result_of_the_cpu_itself_needs_no_more_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "opinion_at_sight", lambda *_: None)
    monkeypatch.setattr(runs, "gather", lambda *_, **__: pytest.fail("evidence was gathered"))
    result = tensorprobe.audit(record(tmp_path / "run"), jobs=0)
    assert result.exit_code == 0 and result.summary.passed == len(result.checks) == CALLS
    rows = [row for check in result.checks for row in check.details]
    assert {row.judged_by for row in rows} == {"equal to the CPU's result"}
    assert any(row.own_relative_l2 == row.relative_l2 > 0 for row in rows)


def test_other_standards_look_at_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(runs, "gather", lambda *args, **more: seen.append(args[0]) or evidence.gather(*args, **more))
    assert tensorprobe.audit(record(tmp_path / "run"), jobs=0, standard="absolute").exit_code == 0
    assert len(seen) == 11


def test_sizes_are_asked_for_once_for_calls_of_equal_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(checks, "outsized", lambda call, _: asked.append(call.name))
    with tensorprobe.capture(tmp_path / "run", level="api", in_process=True):
        for size in (4, 4, 5):
            torch.randn(size, size).tanh()
    tensorprobe.audit(tmp_path / "run", jobs=0)
    assert asked == ["Torch.randn.0.forward", "Tensor.tanh.0.forward", "Torch.randn.2.forward", "Tensor.tanh.2.forward"]

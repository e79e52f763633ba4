"""Two versions of torch make a composite function of other calls: that is no divergence as long as its result agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe
from tensorprobe.engine.comparison import compare
from tensorprobe.taps import plans
from tensorprobe.taps.override_free import COMPOSITES, body_of, opened_function

Change = Callable[[Tensor], Tensor]


def record(out: Path, monkeypatch: pytest.MonkeyPatch, change: Change | None = None) -> Path:
    """Train an attention layer whose composite function is made of other calls, as in another version of torch."""
    original = opened_function(F.multi_head_attention_forward)
    assert original is not None

    def other(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        return (output if change is None else change(output)), weights

    with monkeypatch.context() as patched:
        patched.setattr(
            plans, "body_of", lambda *what: body_of(*what) and (other if what[1] is COMPOSITES else body_of(*what))
        )
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        with tensorprobe.capture(out, model=attention):
            value = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
            attention(value, value, value)[0].sin().sum().backward()
    return out


def test_other_calls_inside_a_function_whose_result_agrees_are_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = record(tmp_path / "older", monkeypatch)
    newer = record(tmp_path / "newer", monkeypatch, lambda output: (output * 2) / 2)
    result = compare(older, newer)
    assert result.divergence is None
    assert result.agrees
    (region,) = result.summary.regions
    assert region.agrees and not region.baseline
    assert {"Tensor.mul.1.forward", "Tensor.div.0.forward"} <= set(region.candidate)


def test_a_function_whose_result_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = record(tmp_path / "older", monkeypatch)
    newer = record(tmp_path / "newer", monkeypatch, lambda output: output * 1.01)
    divergence = compare(older, newer).divergence
    assert divergence is not None
    assert divergence.call == "Functional.multi_head_attention_forward.0.forward"
    assert divergence.status == "introduced"


def test_a_call_that_stands_by_itself_is_still_a_divergence(tmp_path: Path) -> None:
    for name in ("without", "with"):
        with tensorprobe.capture(tmp_path / name):
            value = torch.linspace(-1, 1, 6)
            if name == "with":
                (value * 2).sum()
            value.sin()
    divergence = compare(tmp_path / "without", tmp_path / "with").divergence
    assert divergence is not None
    assert divergence.status == "structural"
    assert divergence.candidate_call == "Tensor.mul.0.forward"


def test_an_extra_call_that_returns_what_it_was_given_is_no_divergence(tmp_path: Path) -> None:
    """With an older torch `x[:, :]` is a slice for each colon, also of zeros, whose maker nobody can tell."""
    for name in ("without", "with"):
        with tensorprobe.capture(tmp_path / name, level="aten"):
            value = torch.zeros(2, 3)
            (torch.ops.aten.slice.Tensor(value, 1, 0, 2**63 - 1) if name == "with" else value).cos()
    assert compare(tmp_path / "without", tmp_path / "with").agrees

"""float32 against a narrower dtype: what that must lose is explained by it, and a fault above it is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorprobe


class Net(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        held = F.gelu(self.norm(self.first(x)), approximate="tanh" if self.factor == 1 else "none")
        logits: Tensor = self.last(held * self.factor)
        return logits


def train(folder: Path, how: str, level: str = "api", factor: float = 1.0) -> Path:
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(how, torch.float32)
    model = Net(factor).to(dtype)
    data = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    settings = {"level": level, "in_process": True, "stacks": False}
    with tensorprobe.capture(folder, model=model, **settings) as probe:  # type: ignore[arg-type]
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
                loss = model(data).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.step()
    return folder


@pytest.mark.parametrize("how", ["bf16", "autocast", "fp16"])
@pytest.mark.parametrize("level", ["api", "module"])
def test_a_narrower_dtype_explains_what_it_loses(how: str, level: str, tmp_path: Path) -> None:
    runs = train(tmp_path / "a", "fp32", level), train(tmp_path / "b", how, level)
    result = tensorprobe.compare(*runs, prove="off")
    assert result.exit_code == 0, str(result)
    narrow = "float16" if how == "fp16" else "bfloat16"
    (note,) = [note for note in result.summary.notes if "explained by" in note]
    assert f"explained by {narrow}: " in note
    assert "most is lost in " in note


@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_a_fault_above_the_rounding_of_the_narrower_dtype_is_named(how: str, tmp_path: Path) -> None:
    runs = train(tmp_path / "a", "fp32"), train(tmp_path / "b", how, factor=1.1)
    result = tensorprobe.compare(*runs, prove="off")
    assert result.divergence is not None
    assert result.divergence.call in ("Functional.gelu.0.forward", "Tensor.mul.0.forward"), str(result)
    assert not [note for note in result.summary.notes if "explained by" in note]

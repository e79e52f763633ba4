"""Forty steps of two right runs agree on two devices, and an error in step 37 is named there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe

STEPS, LATE = 40, 37
Fault = Callable[[nn.Module], None]


class Wide(TorchDispatchMode):
    """A second device: it computes in float64 and rounds once. From step LATE on, one op may be wrong."""

    def __init__(self, wrong: Any = None) -> None:
        super().__init__()
        self.step, self._wrong = 0, wrong

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what a device does is no call of the program
            made = func(*_cast(args, torch.float32, torch.float64), **(kwargs or {})) if _computes(func) else None
            if made is None:
                made = func(*args, **(kwargs or {}))
            made = _cast(made, torch.float64, torch.float32)
            return made * 1.03 if func is self._wrong and self.step == LATE else made


_WIDE = {"addmm", "mm", "bmm", "gelu", "gelu_backward", "tanh", "tanh_backward", "native_layer_norm", "_log_softmax"}
_WIDE |= {
    "native_layer_norm_backward",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
    "sum",
    "mean",
}


def _computes(func: Any) -> bool:
    return func._schema.name.removeprefix("aten::") in _WIDE


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(new) if value.dtype == old else value
    return type(value)(_cast(each, old, new) for each in value) if isinstance(value, (tuple, list)) else value


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        logits: Tensor = self.head(x + self.out(torch.softmax(q @ k.mT / 4, -1) @ v))
        return logits.flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(20, 16), nn.Linear(32, 16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        state, states = torch.zeros(len(tokens), 16), []
        for x in self.table(tokens).unbind(1):
            state = torch.tanh(self.cell(torch.cat((x, state), -1)))
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits.flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20), nn.Flatten(0, 1))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "attention, AdamW": (Attention, partial(torch.optim.AdamW, lr=3e-3)),
    "recurrent, SGD": (Recurrent, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "mlp, Adam on lists": (mlp, partial(torch.optim.Adam, lr=3e-3, foreach=True)),
    "mlp, RMSprop": (mlp, partial(torch.optim.RMSprop, lr=1e-3)),
    "attention, Adagrad": (Attention, partial(torch.optim.Adagrad, lr=1e-2)),
}
MODES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "summary": {"mode": "summary"},
    "module": {"level": "module"},
}


def train(out: Path, name: str, mode: str, device: Wide | None, late: Fault | None = None) -> Path:
    build, optimize = PROGRAMS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = optimize(model.parameters())
    generator = torch.Generator().manual_seed(1)
    options = {"stacks": False, "in_process": True, "steps_by": "optimizer"} | MODES[mode]
    with tensorprobe.capture(out, model=model, **options), device or contextlib.nullcontext():
        for step in range(STEPS):
            if device is not None:
                device.step = step
            tokens = torch.randint(20, (4, 6), generator=generator)
            F.cross_entropy(model(tokens), tokens.roll(-1, 1).flatten()).backward()
            if late is not None and step == LATE:
                late(model)
            optimizer.step()
            optimizer.zero_grad()
    return out


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("attention, AdamW", "tensor"),
        ("attention, AdamW", "module"),
        ("recurrent, SGD", "tensor"),
        ("mlp, Adam on lists", "summary"),
        ("mlp, RMSprop", "module"),
    ],
)
def test_forty_right_steps_on_two_devices_agree(name: str, mode: str, tmp_path: Path) -> None:
    runs = train(tmp_path / "a", name, mode, None), train(tmp_path / "b", name, mode, Wide())
    result = tensorprobe.compare(*runs, prove="off")
    assert result.exit_code == 0, str(result)


def raised_gradient(model: nn.Module) -> None:
    """Change a gradient by 5 %, with no call that is recorded."""
    gradient = next(value for value in model.parameters() if value.dim() > 1).grad
    assert gradient is not None
    with torch._C.DisableTorchFunction():
        gradient.mul_(1.05)


@pytest.mark.parametrize(
    ("name", "mode"), [("attention, AdamW", "tensor"), ("mlp, RMSprop", "summary"), ("mlp, Adam on lists", "tensor")]
)
def test_an_error_in_step_37_is_named_there(name: str, mode: str, tmp_path: Path) -> None:
    right = train(tmp_path / "a", name, mode, None)
    result = tensorprobe.compare(
        right, train(tmp_path / "b", name, mode, Wide(torch.ops.aten.addmm.default)), prove="off"
    )
    assert result.divergence is not None, str(result)
    assert (result.divergence.step, result.divergence.call) == (LATE, "Functional.linear.0.forward"), str(result)
    result = tensorprobe.compare(right, train(tmp_path / "c", name, mode, Wide(), raised_gradient), prove="off")
    assert result.divergence is not None and result.divergence.step == LATE, str(result)

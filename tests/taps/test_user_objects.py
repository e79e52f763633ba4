"""What a user's program does with its own objects goes on working while capture is on: copies, pickles, scripts, traces."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe
from tests.taps.tiny import LEVELS, Stack, features, names

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")

gelu_imported_before = F.gelu


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.1 warns of its own torch.load
@pytest.mark.parametrize("level", LEVELS)
def test_model_is_copied_and_pickled(level: str, tmp_path: Path) -> None:
    model = Stack()
    with tensorprobe.capture(tmp_path / "run", model=model, level=level):
        expected = model(features())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(features()), expected)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        twin = Stack()
        twin.load_state_dict(torch.load(buffer, weights_only=True))
        assert torch.equal(twin(features()), expected)
    assert torch.equal(model(features()), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_tensors_are_copied_and_pickled(level: str, tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", level=level):
        tensor = torch.arange(6.0).view(2, 3).t()
        leaf = nn.Parameter(torch.ones(2))
        for twin in (copy.deepcopy(tensor), copy.copy(tensor), pickle.loads(pickle.dumps(tensor))):
            assert torch.equal(twin, tensor)
            assert twin.stride() == tensor.stride()
        assert isinstance(copy.deepcopy(leaf), nn.Parameter)


def test_functions_keep_their_identity(tmp_path: Path) -> None:
    before = {name: getattr(F, name) for name in ("gelu", "linear", "relu")}
    with tensorprobe.capture(tmp_path / "run"):
        assert F.gelu is gelu_imported_before
        assert all(getattr(F, name) is function for name, function in before.items())
        assert torch.Tensor.add is torch.Tensor.__dict__.get("add", torch.Tensor.add)
        gelu_imported_before(torch.ones(2))
    assert "Functional.gelu.0.forward" in names(tensorprobe.open_run(tmp_path / "run"))


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("level", LEVELS)
def test_models_are_scripted_and_traced_and_the_blind_spot_is_told(level: str, tmp_path: Path) -> None:
    model = Scriptable()
    data = torch.ones(2, 3)
    with tensorprobe.capture(tmp_path / "run", model=model, level=level) as probe:
        expected = model(data)
        scripted = torch.jit.script(model)
        traced = torch.jit.trace(model, data)
        assert torch.equal(scripted(data), expected)
        assert torch.equal(traced(data), expected)
        function = torch.jit.script(scriptable_function)
        assert torch.equal(function(data), data * 2 + 1)
    assert probe.coverage is not None
    assert probe.coverage.failed == 0
    assert any("torch.jit" in spot for spot in probe.coverage.blind_spots)


def scriptable_function(x: Tensor) -> Tensor:
    return x * 2 + 1


def test_attention_in_eval_mode_is_told_as_a_blind_spot(tmp_path: Path) -> None:
    attention = nn.MultiheadAttention(8, 2).eval()
    with tensorprobe.capture(tmp_path / "run", model=attention) as probe, torch.no_grad():
        attention(*[torch.randn(3, 2, 8)] * 3)
    assert probe.coverage is not None
    assert any("fast path" in spot for spot in probe.coverage.blind_spots)


def test_user_hooks_on_modules_and_tensors_still_run(tmp_path: Path) -> None:
    model, seen = nn.Linear(2, 2), []
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_forward_hook(lambda *_: seen.append("post"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.weight.register_hook(lambda _: seen.append("tensor"))
    with tensorprobe.capture(tmp_path / "run", model=model, level="mix"):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "post", "pre", "tensor"]


def test_saved_tensor_hooks_of_the_user_see_only_their_own_tensors(tmp_path: Path) -> None:
    def packed(out: Path | None) -> int:
        seen: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor

        probe = None if out is None else tensorprobe.Probe(out).start()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = torch.sin(torch.ones(3, requires_grad=True)).expand(2, 3).t()
            (hidden * hidden).sum().backward()
        if probe is not None:
            probe.stop()
        return len(seen)

    assert packed(tmp_path / "run") == packed(None)

"""torch.compile beside capture: compiled regions pass through, whole graphs still compile, and results stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensorprobe
from tensorprobe import torch_names
from tests.taps.scripts import run_python, write_script
from tests.taps.tiny import LEVELS, names

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))


def train(model: nn.Module, whole: nn.Module) -> list[Tensor]:
    """Two steps; the losses and the final parameters."""
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    found = []
    for step in range(2):
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = model(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
    return found + [parameter.detach().clone() for parameter in whole.parameters()]


def fresh_model() -> Small:
    torch.manual_seed(0)
    return Small()


def plain_outcome(backend: str) -> list[Tensor]:
    model = fresh_model()
    outcome = train(torch.compile(model, backend=backend, fullgraph=True), model)
    torch._dynamo.reset()
    return outcome


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_graph_compiled_during_capture_trains_the_same(backend: str, level: str, tmp_path: Path) -> None:
    plain = plain_outcome(backend)
    model = fresh_model()
    with tensorprobe.capture(tmp_path / "run", model=model, level=level) as probe:
        captured = train(torch.compile(model, backend=backend, fullgraph=True), model)
    assert_equal(plain, captured)
    assert probe.coverage is not None
    assert probe.coverage.failed == 0


@pytest.mark.parametrize("level", LEVELS)
def test_model_compiled_before_capture_trains_the_same(level: str, tmp_path: Path) -> None:
    model = fresh_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = train(compiled, model) + train(compiled, model)
    torch._dynamo.reset()
    model = fresh_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    captured = train(compiled, model)
    with tensorprobe.capture(tmp_path / "run", model=model, level=level):
        captured += train(compiled, model)
    assert_equal(plain, captured)


def test_compiled_model_still_works_after_capture(tmp_path: Path) -> None:
    model = fresh_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with tensorprobe.capture(tmp_path / "run", model=model):
        inside = compiled(torch.ones(2, 4))
    assert torch.equal(compiled(torch.ones(2, 4)), inside)


def test_calls_beside_a_compiled_region_are_recorded_and_the_blind_spot_is_told(tmp_path: Path) -> None:
    model = fresh_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with tensorprobe.capture(tmp_path / "run", model=compiled) as probe:
        torch.exp(compiled(torch.ones(2, 4))).sum().backward()
    found = names(tensorprobe.open_run(tmp_path / "run"))
    assert {"Torch.exp.0.forward", "Torch.exp.0.backward"} <= set(found)
    assert probe.coverage is not None
    assert any("torch.compile" in spot for spot in probe.coverage.blind_spots)


@pytest.mark.parametrize("level", LEVELS)
def test_model_is_compiled_after_an_eager_training_was_captured(level: str, tmp_path: Path) -> None:
    model, data = fresh_model(), torch.ones(2, 4)
    expected = model(data)
    with tensorprobe.capture(tmp_path / "run", level=level, in_process=True):
        train(fresh_model(), fresh_model())
        assert torch.equal(torch.compile(model, backend="aot_eager")(data), expected)


def test_compiled_function_gives_the_same_result(tmp_path: Path) -> None:
    setters = [getattr(*place) for place in torch_names.frame_callback_setters()]
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="eager", fullgraph=True)
    with tensorprobe.capture(tmp_path / "run") as probe:
        result = [compiled(torch.ones(3)) for _ in range(20)][-1]
        torch.cos(result)
    assert torch.equal(result, torch.sin(torch.ones(3)) + 1)
    assert "Torch.cos.0.forward" in names(tensorprobe.open_run(tmp_path / "run"))
    if not torch_names.COMPILES_THROUGH:
        assert probe.coverage is not None
        assert set(probe.coverage.blind_spots) == {"compiled code (torch.compile): calls inside are not seen"}
    assert {getattr(*place) for place in torch_names.frame_callback_setters()} == set(setters)


@pytest.mark.needs_torch("2.8", "inductor of an older torch warns of its own settings")
@pytest.mark.process
def test_inductor_compiles_a_whole_graph_while_capture_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def function(x: Tensor) -> Tensor:
        return torch.sin(x) * 2 + x

    data = torch.randn(64)
    plain = torch.compile(function, fullgraph=True)(data)
    torch._dynamo.reset()
    with tensorprobe.capture(tmp_path / "run"):
        captured = torch.compile(function, fullgraph=True)(data)
    assert torch.equal(plain, captured)


@pytest.mark.process
def test_calls_that_the_import_of_the_compiler_makes_are_not_recorded(tmp_path: Path) -> None:
    """The first optimizer imports torch._dynamo, which calls 71 functions in torch 2.6."""
    script = """
        import torch, tensorprobe
        weight = torch.ones(2, requires_grad=True)
        with tensorprobe.capture("run", in_process=True):
            torch.optim.SGD([weight])
            import torch._dynamo
            weight * 2
    """
    run_python([write_script(tmp_path, script)], tmp_path, cold=True)
    assert [call.op for call in tensorprobe.open_run(tmp_path / "run").calls()] == ["Tensor.mul"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["api", "aten"])
def test_frames_of_the_tool_are_not_compiled_between_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Between its graphs a compiled function runs with torch's frame hook on: what a tap does there is not the program's."""
    from torch._dynamo import convert_frame

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.memory = nn.Linear(4, 4), nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            torch._dynamo.graph_break()
            first = x[0, 0].item()
            x, _ = self.memory(x)
            x[0] = first
            return x.sum()

    compiled = set()
    original = convert_frame._compile

    def counted(code, *args, **kwargs):
        if Path(code.co_filename).is_relative_to(Path(tensorprobe.__file__).parent):
            compiled.add(code.co_name)
        return original(code, *args, **kwargs)

    torch.manual_seed(0)
    model = Broken()
    expected = [model(torch.ones(rows, 4)).item() for rows in (2, 3, 4)]
    monkeypatch.setattr(convert_frame, "_compile", counted)
    function = torch.compile(model, backend="eager")
    with tensorprobe.capture(tmp_path / "run", model=model, level=level):
        got = [function(torch.ones(rows, 4)).item() for rows in (2, 3, 4)]
    assert got == expected
    assert compiled <= {"__call__"}  # the wrapper of nn.Module.__call__, which torch.compile traces through

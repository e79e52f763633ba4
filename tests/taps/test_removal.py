"""Nothing stays installed: after stop, after errors of the user's code, inside other modes. The fixture of tests/conftest.py
looks after each of these; here is what must happen on the way."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tensorprobe
from tensorprobe.errors import SettingsError
from tests.conftest import assert_nothing_installed
from tests.taps.tiny import LEVELS, names, record, the_call


class Boom(Exception):
    """The user's own error."""


class Passing(TorchFunctionMode):
    """A user's mode that counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Twice(nn.Module):
    """Its input's gradient comes by two ways."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + torch.cos(x)


class PassingDispatch(TorchDispatchMode):
    """The same for ATen calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", LEVELS)
def test_error_of_the_user_passes_and_everything_is_removed(level: str, tmp_path: Path) -> None:
    with pytest.raises(Boom), tensorprobe.capture(tmp_path / "run", level=level):
        nn.Linear(2, 2)(torch.ones(1, 2))
        raise Boom
    assert_nothing_installed()
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.closed
    assert names(run)


@pytest.mark.parametrize("level", LEVELS)
def test_error_inside_an_op_is_recorded_with_its_inputs(level: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (
        pytest.raises(RuntimeError, match=r"shape|size"),
        tensorprobe.capture(tmp_path / "run", model=model, level=level),
    ):
        model(torch.ones(1, 3))
    assert_nothing_installed()
    run = tensorprobe.open_run(tmp_path / "run")
    failed = [call for call in run.calls() if call.raised is not None]
    expected = {
        "module": ["Module.Linear.forward.0"],
        "api": ["Functional.linear.0.forward"],
        "aten": ["Aten.addmm.default.0.forward"],
        "mix": ["Functional.linear.0.forward", "Module.Linear.forward.0"],
    }
    assert [call.name for call in failed] == expected[level]
    assert {call.raised for call in failed} == {"RuntimeError"}
    assert all(call.inputs and not call.outputs for call in failed)


@pytest.mark.parametrize("level", LEVELS)
def test_error_inside_a_backward_passes_and_the_next_backward_is_recorded(level: str, tmp_path: Path) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise Boom

    data = torch.randn(3, requires_grad=True)
    model = nn.Linear(3, 1)
    with tensorprobe.capture(tmp_path / "run", model=model, level=level) as probe:
        with pytest.raises(Boom):
            model(Failing.apply(torch.sin(data))).sum().backward()
        model(data).sum().backward()
    assert data.grad is not None
    assert probe.coverage is not None
    assert probe.coverage.failed == 0
    backwards = [call for call in tensorprobe.open_run(tmp_path / "run").calls() if call.direction == "backward"]
    assert backwards


@pytest.mark.parametrize("level", ["api", "aten"])
def test_probe_started_inside_a_mode_and_stopped_outside_of_it(level: str, tmp_path: Path) -> None:
    probe = tensorprobe.Probe(tmp_path / "run", level=level)
    with Passing() as function, PassingDispatch() as dispatch:
        probe.start()
        torch.sin(torch.ones(2))
        assert "sin" in function.seen
        assert "aten.sin.default" in dispatch.seen
    torch.cos(torch.ones(2))
    probe.stop()
    assert_nothing_installed()
    found = " ".join(names(tensorprobe.open_run(tmp_path / "run")))
    assert "sin" in found
    assert "cos" in found


@pytest.mark.parametrize("level", ["api", "aten"])
def test_probe_stopped_inside_a_mode_that_was_entered_after_it(level: str, tmp_path: Path) -> None:
    probe = tensorprobe.Probe(tmp_path / "run", level=level)
    probe.start()
    with Passing() as function, PassingDispatch() as dispatch:
        torch.sin(torch.ones(2))
        probe.stop()
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._len_torch_dispatch_stack() == 1
        torch.cos(torch.ones(2))
        assert "cos" in function.seen
        assert "aten.cos.default" in dispatch.seen
    assert_nothing_installed()
    found = " ".join(names(tensorprobe.open_run(tmp_path / "run")))
    assert "sin" in found
    assert "cos" not in found


@pytest.mark.parametrize("level", LEVELS)
def test_modes_of_the_user_see_no_calls_of_the_tool(level: str, tmp_path: Path) -> None:
    def seen(out: Path | None) -> tuple[list[str], list[str]]:
        torch.manual_seed(0)
        data = torch.randn(3, 4, requires_grad=True)
        probe = None if out is None else tensorprobe.Probe(out, level=level)
        if probe is not None:
            probe.start()
        with Passing() as function, PassingDispatch() as dispatch:
            hidden = torch.sin(data).t() * torch.arange(3)
            hidden = hidden * hidden
            hidden = Twice()(hidden)
            (hidden @ hidden.t()).conj().expand(2, 4, 4).sum().backward()
            (torch.stack([hidden.detach()] * 2) + 1).to(torch.complex64).conj().sum()
        if probe is not None:
            probe.stop()
        return function.seen, dispatch.seen

    assert seen(tmp_path / "run") == seen(None)


def test_several_probes_one_after_the_other(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for number, level in enumerate((*LEVELS, "api")):
        run = record(tmp_path / str(number), lambda: model(torch.ones(1, 2)).sum().backward(), model=model, level=level)
        assert_nothing_installed()
        assert names(run)
        assert run.closed


def test_one_probe_can_be_started_again_into_its_folder_when_told_to_overwrite(tmp_path: Path) -> None:
    probe = tensorprobe.Probe(tmp_path / "run", overwrite=True)
    for op in (torch.sin, torch.cos):
        probe.start()
        op(torch.ones(2))
        probe.stop()
    assert "Torch.cos.0.forward" in names(tensorprobe.open_run(tmp_path / "run"))
    assert "Torch.sin.0.forward" not in names(tensorprobe.open_run(tmp_path / "run"))


def test_second_probe_while_one_runs_is_refused(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "first"):
        with pytest.raises(SettingsError, match="is running in this process"):
            tensorprobe.Probe(tmp_path / "second").start()
        torch.sin(torch.ones(2))
    assert not (tmp_path / "second").exists()
    assert "Torch.sin.0.forward" in names(tensorprobe.open_run(tmp_path / "first"))


def test_start_and_stop_may_be_called_twice(tmp_path: Path) -> None:
    probe = tensorprobe.Probe(tmp_path / "run")
    assert probe.start() is probe.start()
    assert probe.running
    first = probe.stop()
    assert first is not None
    assert not probe.running
    assert probe.stop() == first


def test_start_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.taps.recompute import RecomputeTap

    def failing(_: RecomputeTap) -> None:
        raise Boom

    monkeypatch.setattr(RecomputeTap, "install", failing)
    with pytest.raises(Boom):
        tensorprobe.Probe(tmp_path / "run").start()
    gc.collect()
    assert_nothing_installed()


@pytest.mark.parametrize("level", LEVELS)
def test_stop_inside_a_backward_does_no_harm(level: str, tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    probe = tensorprobe.Probe(tmp_path / "run", level=level)

    def stop(_: Tensor) -> None:
        probe.stop()

    weight.register_post_accumulate_grad_hook(stop)
    with probe:
        torch.sin(weight).sum().backward()
        torch.cos(weight).sum().backward()
    torch.testing.assert_close(weight.grad, torch.cos(torch.ones(3)) - torch.sin(torch.ones(3)))
    run = tensorprobe.open_run(tmp_path / "run")
    assert not any("cos.0" in name for name in names(run))


@pytest.mark.parametrize("level", LEVELS)
def test_a_thread_that_ends_during_a_backward_does_not_keep_the_modes_on(level: str, tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    probe = tensorprobe.Probe(tmp_path / "run", level=level)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)

    def stop(_: Tensor) -> None:
        probe.stop()
        over.set()
        thread.join()

    weight.register_post_accumulate_grad_hook(stop)
    with probe:
        thread.start()
        torch.sin(weight).sum().backward()
        assert_nothing_installed()


@pytest.mark.parametrize("steps", [None, [0], [1]])
def test_step_inside_a_backward_does_no_harm(steps: list[int] | None, tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    probe = tensorprobe.Probe(tmp_path / "run", steps_by="optimizer", steps=steps)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with probe:
        torch.sin(weight).sum().backward()
        nn.Identity()(weight)  # a model is called in each step
        torch.cos(weight).sum().backward()
    torch.testing.assert_close(weight.grad, torch.cos(torch.ones(3)) - torch.sin(weight + 0.1 * weight.grad))
    run = tensorprobe.open_run(tmp_path / "run")
    assert {0, 1, 2} & set(run.steps) == set(steps or [0, 1])
    assert 1 not in run.steps or "Torch.cos.0.forward" in names(run, step=1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_that_leaves_the_block_by_itself_does_not_end_the_run(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run") as probe:
        torch.sin(torch.ones(2))
        child = os.fork()
        if child == 0:
            try:
                torch.tan(torch.ones(2))
                probe.step()
                probe.stop()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        torch.cos(torch.ones(2))
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.closed
    found = names(run)
    assert [name for name in found if name.split(".")[1] in ("sin", "tan", "cos")] == [
        "Torch.sin.0.forward",
        "Torch.cos.0.forward",
    ]


def test_hooks_on_a_graph_that_outlives_the_probe_do_nothing(tmp_path: Path) -> None:
    data = torch.randn(3, requires_grad=True)
    kept: list[Tensor] = []
    run = record(tmp_path / "run", lambda: kept.append(torch.sin(data).sum()))
    size = os.path.getsize(tmp_path / "run" / "step0" / "rank0" / "calls.jsonl")  # noqa: PTH202
    kept[0].backward()
    assert torch.equal(data.grad, torch.cos(data))
    assert os.path.getsize(tmp_path / "run" / "step0" / "rank0" / "calls.jsonl") == size  # noqa: PTH202
    assert the_call(run, "Torch.sin.0.forward").outputs


def test_the_code_and_globals_of_the_program_are_let_go(tmp_path: Path) -> None:
    space = {"torch": torch, "Held": type("Held", (), {})}
    held = weakref.ref(space["Held"])
    with tensorprobe.capture(tmp_path / "run"):
        exec("torch.ones(2).exp()", space)
    del space
    gc.collect()
    assert held() is None

"""A sink gets what it declares that it needs, and nothing else is asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tensorprobe.errors import SettingsError
from tensorprobe.model import CaptureLevel
from tensorprobe.model.event import Event
from tensorprobe.model.sink import AtenNumbers, CallRules, LookingSink, Needs, SecondSink, Sink, Tensors
from tensorprobe.registry import WRITERS
from tensorprobe.taps import Probe, watch_kernels
from tests.taps.tiny import Stack, features


class Names(Sink):
    """Keeps the names of calls, and for each the slots that were taken."""

    def __init__(self, **rules: Any) -> None:
        self.needs = Needs(rules=CallRules(**rules))
        self.calls: dict[str, list[str]] = {}

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Any]:
        return [name for name, _ in tensors]

    def call(self, event: Event) -> None:
        self.calls[event.name] = list(map(str, event.slots))


def train() -> None:
    Stack()(features()).pow(2).sum().backward()


def test_a_sink_gets_events_with_what_it_took(tmp_path: Path) -> None:
    sink = Names()
    with Probe(tmp_path / "nothing", sink=sink):
        torch.add(torch.ones(2), torch.ones(2, requires_grad=True)).sum().backward()
    assert sink.calls["Torch.add.0.forward"] == ["input.0", "input.1", "output.0"]
    assert sink.calls["Torch.add.0.backward"] == ["input.0", "output.1"]
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("sink", [Names, []])
def test_what_is_no_instance_of_a_sink_is_refused(sink: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected an instance of a class derived from Sink"):
        Probe(tmp_path / "nothing", sink=sink)


@pytest.mark.parametrize("level", list(CaptureLevel))
def test_a_sink_without_any_method_is_a_sink(level: str, tmp_path: Path) -> None:
    with Probe(tmp_path / "nothing", sink=Sink(), level=level) as probe:
        train()
    assert probe.coverage is not None
    assert probe.coverage.recorded > 0
    assert probe.coverage.slots == probe.coverage.failed == 0


def test_rules_of_a_sink_name_choose_and_number_calls(tmp_path: Path) -> None:
    x = torch.ones(2)
    sink = Names(operators=True, listed=("add",), excluded=frozenset({"Tensor.add"}), numbers={"Tensor.__add__": 7})
    with Probe(tmp_path / "nothing", sink=sink):
        x + x
        x.add(x)
        x - x
    assert list(sink.calls) == ["Tensor.__add__.7.forward"]


class Looks(LookingSink):
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def after(self, call: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        self.seen.append(call.name)

    def gradients(self, call: Any, results: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        self.seen.append(call.backward_name)


def test_a_look_is_all_that_a_looking_sink_gets(tmp_path: Path) -> None:
    sink, x = Looks(), torch.ones(2, requires_grad=True)
    with Probe(tmp_path / "nothing", sink=sink) as probe:
        x.sin().sum().backward()
    assert [name for name in sink.seen if "sin" in name] == ["Tensor.sin.0.forward", "Tensor.sin.0.backward"]
    assert probe.coverage is not None
    assert probe.coverage.slots == 0


def test_a_looking_sink_that_stops_raises_between_calls(tmp_path: Path) -> None:
    class Stops(Looks):
        def after(self, call: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
            self.stop = RuntimeError("enough") if call.name.startswith("Torch.cos") else None

    with Probe(tmp_path / "nothing", sink=Stops()):
        torch.sin(torch.ones(2))
        with pytest.raises(RuntimeError, match="enough"):
            torch.cos(torch.ones(2))
        torch.cos(torch.ones(2))  # nothing is watched any more


class Doubles(SecondSink):
    """Has the program go on with twice what `mm` gives."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, func: Any, args: Any, kwargs: Any, numbers: AtenNumbers) -> Any:
        if func is not torch.ops.aten.mm.default:
            numbers.count(str(func))
            return None
        return numbers.event("Aten.mm.default")

    def end(self, opened: Event, result: Any) -> Any:
        self.names.append(opened.name)
        return result * 2


def test_a_second_execution_may_replace_the_result(tmp_path: Path) -> None:
    sink = Doubles()
    with Probe(tmp_path / "nothing", sink=sink, level="aten"):
        found = torch.eye(2) @ torch.eye(2)
    assert found.tolist() == [[2, 0], [0, 2]]
    assert sink.names == ["Aten.mm.default.0.forward"]


@pytest.mark.parametrize("level", ["api", "aten"])
def test_any_sink_may_skip_calls_and_their_numbers_are_counted(level: str, tmp_path: Path) -> None:
    class Skips(Names):
        def skip(self, plan: Any, args: Any) -> bool:
            return "cos" in plan.name or args[0].numel() == 3

    sink = Skips()
    with Probe(tmp_path / "nothing", sink=sink, level=level) as probe:
        for size in (2, 3, 2):
            torch.sin(torch.cos(torch.ones(size)))
    assert [name for name in sink.calls if "cos" in name or ".sin" in name] == [
        f"{'Torch.sin' if level == 'api' else 'Aten.sin.default'}.{number}.forward" for number in (0, 2)
    ]
    assert probe.coverage is not None and probe.coverage.filtered >= 4


def test_a_sink_of_second_executions_may_skip_too(tmp_path: Path) -> None:
    sink = Doubles()
    sink.skip = lambda plan, args: plan.name == "Aten.mm.default" and not args[0].any()
    with Probe(tmp_path / "nothing", sink=sink, level="aten"):
        torch.zeros(2, 2) @ torch.eye(2)
        torch.eye(2) @ torch.eye(2)
    assert sink.names == ["Aten.mm.default.1.forward"]


@pytest.mark.parametrize("needs", [Needs(look=True), Needs(second=True)])
def test_a_tap_asks_what_a_sink_needs_and_not_what_it_is(needs: Needs, tmp_path: Path) -> None:
    """A stranger's sink wraps another: it has the methods and is of no class of ours."""

    class Wraps(Sink):
        def __init__(self, inner: Any) -> None:
            self.needs, self.inner = needs, inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    looks, doubles = Looks(), Doubles()
    with Probe(
        tmp_path / "nothing", sink=Wraps(looks if needs.look else doubles), level="api" if needs.look else "aten"
    ):
        torch.eye(2) @ torch.eye(2)
    assert [name for name in (*looks.seen, *doubles.names) if "mm" in name or "matmul" in name]


def test_what_a_sink_raises_never_reaches_the_program(tmp_path: Path) -> None:
    class Broken(Names):
        def call(self, event: Event) -> None:
            raise ValueError("the sink has a bug")

    probe = Probe(tmp_path / "nothing", sink=Broken())
    with pytest.warns(UserWarning, match="the sink has a bug"), probe:
        train()
    assert probe.coverage is not None
    assert probe.coverage.recorded == 0


def test_kernels_of_one_function_are_seen_beside_a_running_probe(tmp_path: Path) -> None:
    outer, inner = Names(), Names()
    with Probe(tmp_path / "nothing", sink=outer):
        coverage = watch_kernels(lambda: torch.ones(2, 2).mm(torch.ones(2, 2)), inner, sides=("output",))
    assert inner.calls["Aten.mm.default.0.forward"] == ["output.0"]
    assert coverage.recorded == len(inner.calls)
    assert "Tensor.mm.0.forward" in outer.calls


def test_a_recorder_imports_no_writer_that_is_not_registered(tmp_path: Path) -> None:
    from tensorprobe.record.writer import RunWriter

    assert set(WRITERS) == {"acl", "msprobe", "ptdbg"}
    writer = RunWriter(tmp_path, 0, keep_data=True, in_process=True, layout="os:getcwd")
    writer.close({}, {}, "")
    assert writer.failure is not None and "KeyError" in writer.failure

"""Capture proves itself before the program begins, and raises there when it does not work."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tensorprobe
from tensorprobe import torch_names
from tensorprobe.errors import CaptureIncomplete, SelfTestFailed
from tensorprobe.model import CaptureLevel
from tensorprobe.numerics.native import SWITCH
from tensorprobe.record import snapshot
from tensorprobe.taps import self_test
from tensorprobe.taps.settings import MODES
from tests.taps.scripts import run_tool, write_script
from tests.taps.tiny import LEVELS


@pytest.fixture(autouse=True)
def nothing_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_passed", set())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("native", [True, False])
def test_every_level_and_mode_passes(native: bool, level: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(snapshot, "fast", None)
    assert self_test.find_problem(level, mode, "cpu") == ""


def test_a_torch_whose_tensors_cannot_be_read_is_refused_before_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: Any) -> int:
        raise AttributeError("'Tensor' object has no attribute 'const_data_ptr'")

    monkeypatch.setattr(snapshot, "fast", None)
    monkeypatch.setattr(torch_names, "address_of", unreadable)
    with pytest.raises(SelfTestFailed, match="no attribute 'const_data_ptr'") as raised:
        tensorprobe.Probe(tmp_path / "run").start()
    assert "tensorprobe doctor" in str(raised.value)
    assert not (tmp_path / "run").exists()
    assert tensorprobe.active_probe() is None


@pytest.mark.parametrize("mode", MODES)
def test_a_level_says_what_its_record_must_hold(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(self_test._EXPECTED, CaptureLevel.MODULE, {"sum": ("forward", ((7.0,),))})
    assert self_test.find_problem("module", mode, "cpu") and not self_test.find_problem("api", mode, "cpu")


@pytest.mark.parametrize("mode", ["summary", "tensor"])
def test_wrong_values_are_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = snapshot._one_block
    monkeypatch.setattr(snapshot, "fast", None)
    monkeypatch.setattr(snapshot, "_one_block", lambda tensor, stride: original(tensor, stride) * 2)
    assert "product" in self_test.find_problem("api", mode, "cpu")


def test_values_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = snapshot._one_block
    monkeypatch.setattr(snapshot, "fast", None)
    monkeypatch.setattr(snapshot, "_one_block", lambda tensor, stride: original(tensor, stride).flip(0).contiguous())
    assert "wrong values" in self_test.find_problem("api", "tensor", "cpu")


def test_the_program_does_not_notice_the_self_test(tmp_path: Path) -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    before = torch.get_rng_state()
    probe = tensorprobe.Probe(tmp_path / "run")
    with Seeing() as mode:
        probe.start()
        probe.stop()
    assert mode.seen == []
    assert torch.equal(before, torch.get_rng_state())
    assert self_test._passed == {("api", "tensor", "cpu")}


def test_it_runs_once_for_each_level_mode_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(self_test, "find_problem", lambda *key: asked.append(key) or "")
    for number, mode in enumerate(("tensor", "tensor", "summary")):
        with tensorprobe.capture(tmp_path / str(number), mode=mode):
            pass
    assert asked == [("api", "tensor", "cpu"), ("api", "summary", "cpu")]


BROKEN = """
    import torch
    from torch import nn
    from tensorprobe import torch_names

    def unreadable(_):
        raise AttributeError("no address")

    model = nn.Linear(2, 2)
    {early}
    print(model(torch.ones(1, 2)).shape)
    {late}
    print(model(torch.ones(1, 2)).shape)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_command_ends_with_2_when_calls_are_missing(when: str, tmp_path: Path) -> None:
    breaking = {
        "early": "torch_names.address_of = unreadable",
        "late": "tensorprobe.active_probe()._session.begin_call = 1",
    }
    breaking["late"] = "import tensorprobe; " + breaking["late"]
    text = BROKEN.replace("{early}", breaking["early"] if when == "early" else "")
    script = write_script(tmp_path, text.replace("{late}", breaking["late"] if when == "late" else ""))
    command = ["capture", "-o", "run", "--", sys.executable, script]
    done = run_tool(command, tmp_path, code=2, **{SWITCH: "1" if when == "early" else ""})
    assert done.stdout == "torch.Size([1, 2])\n" * 2
    assert ("SelfTestFailed" if when == "early" else "not recorded") in done.stderr


def test_a_plain_tensor_that_cannot_be_read_counts_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture began well; what breaks later is counted and reported: it is never a run that looks complete."""
    monkeypatch.setattr(snapshot, "fast", None)
    given = torch.ones(2)
    probe = tensorprobe.Probe(tmp_path / "run")
    probe.start()

    def unreadable(_: Any) -> int:
        raise AttributeError("no address")

    monkeypatch.setattr(torch_names, "address_of", unreadable)
    nn.functional.relu(torch.empty(2, device="meta"))
    nn.functional.relu(given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        coverage = probe.stop()
    assert coverage is not None
    assert coverage.failed == 1
    assert [warning.category for warning in caught] == [CaptureIncomplete]
    assert "no address" in str(caught[0].message)


def test_recording_stops_when_most_calls_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = tensorprobe.Probe(tmp_path / "run", stacks=False)
    probe.start()
    session: Any = probe._session

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug of the tool")

    monkeypatch.setattr(session, "begin_call", failing)
    for _ in range(1200):
        torch.ones(2)
    with pytest.warns(CaptureIncomplete, match="a bug of the tool"):
        coverage = probe.stop()
    assert coverage is not None
    assert coverage.failed == 1000
    assert coverage.notes == ["recording stopped: most calls failed (1 times)"]

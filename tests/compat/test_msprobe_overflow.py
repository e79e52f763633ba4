"""`task: overflow_check` of msprobe, and what its two commands say of the dump."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from msprobe.pytorch import PrecisionDebugger
from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.legacy.msprobe.cli import run
from tests.compat.msprobe_net import forget_debugger


@pytest.fixture
def debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrecisionDebugger]:
    monkeypatch.chdir(tmp_path)
    settings = {"task": "overflow_check", "dump_path": "dump", "level": "L1", "overflow_check": {"overflow_nums": 2}}
    Path("config.json").write_text(json.dumps(settings))
    made = PrecisionDebugger(config_path="config.json")
    yield made
    forget_debugger()


def step(model: nn.Module) -> torch.Tensor:
    """A mask, whose infinities are meant, and then the logarithm of a negative number."""
    hidden = model(torch.ones(2, 4))
    mask = torch.zeros(2, 4).masked_fill(torch.eye(2, 4).bool(), float("-inf"))
    torch.softmax(hidden + mask, dim=-1).sum().backward()
    return torch.log(hidden.detach() * 0 - 1) + 1


def test_overflows_are_dumped_and_end_the_training(
    debugger: PrecisionDebugger, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"\[overflow 2 times\]: dump file is saved in '.*step1/proc\d+/dump.json'"):
        for _ in range(3):
            debugger.start(model)
            step(model)
            debugger.stop()
            debugger.step()
    for number in range(2):
        (dump,) = Path("dump").glob(f"step{number}/proc*/dump.json")
        (name,) = json.loads(dump.read_text())["data"]
        assert name == "Torch.log.0.forward"
        assert {file.name for file in (dump.parent / "dump_tensor_data").iterdir()} == {
            f"{name}.input.0.pt",
            f"{name}.output.0.pt",
        }
        (stack,) = json.loads((dump.parent / "stack.json").read_text()).values()
        assert "test_msprobe_overflow.py" in str(stack)
    assert torch.relu(torch.zeros(1)) == 0, "nobody is stopped a second time"
    capsys.readouterr()
    assert run(["-f", "pytorch", "run_overflow_check", "-api_info", str(dump)]) == 0
    assert capsys.readouterr().out.startswith("Torch.log.0.forward: normal: ")
    assert run(["overflow_check", "-i", "dump/step0", "-o", "found"]) == 1
    assert "FIRST NAN in Torch.log.0.forward, step 0" in capsys.readouterr().out
    assert json.loads(Path("found/overflow.json").read_text())["first_nonfinite"][0]["call"] == "Torch.log.0.forward"


def test_a_second_turn_of_a_step_keeps_the_overflows_of_the_first(debugger: PrecisionDebugger) -> None:
    debugger.start()
    torch.log(-torch.ones(2))
    debugger.stop()
    debugger.start()
    with pytest.raises(ValueError, match=r"\[overflow 2 times\]"):
        torch.log(-torch.ones(2))
    debugger.stop()
    (dump,) = Path("dump").glob("step0/proc*/dump.json")
    assert list(json.loads(dump.read_text())["data"]) == ["Torch.log.0.forward", "Torch.log.1.forward"]
    assert len(list((dump.parent / "dump_tensor_data").iterdir())) == 4


def test_a_dump_without_overflow_is_empty_and_says_so(debugger: PrecisionDebugger) -> None:
    model = nn.Linear(4, 4)
    debugger.start(model)
    model(torch.ones(2, 4)).sum().backward()
    debugger.stop()
    (dump,) = Path("dump").glob("step0/proc*/dump.json")
    assert json.loads(dump.read_text())["data"] == {}
    with pytest.raises(CannotCompare, match=r"no call of .* could be run again"):
        run(["run_overflow_check", "-api_info", str(dump)])


def test_overflow_check_takes_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="either -i FOLDER or -api_info FILE"):
        run(["overflow_check"])

"""The life of a PrecisionDebugger: steps, ranks, loaders, saved variables, and programs that are killed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import msprobe.pytorch as msprobe
from tensorprobe import capture, open_run
from tensorprobe.errors import CaptureIncomplete, SettingsError, UnknownSetting
from tensorprobe.legacy.msprobe.debugger import PrecisionDebugger
from tests.compat.msprobe_net import (
    HERE,
    files_of,
    forget_debugger,
    index,
    make_net,
    train,
    write_config,
)
from tests.conftest import recorders


@pytest.fixture
def end_debugger() -> Iterator[None]:
    yield
    forget_debugger()


pytestmark = pytest.mark.usefixtures("end_debugger")


def test_a_step_may_be_dumped_in_several_turns(tmp_path: Path) -> None:
    x = torch.ones(2, requires_grad=True)
    PrecisionDebugger(dump_path=str(tmp_path / "dump"), task="tensor", step=["0", "2-3"])
    for _ in range(4):
        for _ in range(2):
            PrecisionDebugger.start()
            F.relu(x)
            PrecisionDebugger.stop()
            F.relu(x)
        PrecisionDebugger.step()
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step0", "step2", "step3"]
    assert list(index(tmp_path, step=2)["data"]) == ["Functional.relu.0.forward", "Functional.relu.1.forward"]
    (stack,) = [stack for stack in index(tmp_path, file="stack.json").values() if len(stack[0]) == 2]
    assert stack[0] == ["Functional.relu.0.forward", "Functional.relu.1.forward"]


def test_what_a_later_turn_does_not_have_of_an_earlier_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2, requires_grad=True)
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"))
    debugger.start()
    out = F.relu(x)
    debugger.stop()
    debugger.start()
    out.sum().backward(retain_graph=True)
    out.backward(torch.ones(2))
    debugger.stop()
    assert "Functional.relu.0.backward" not in index(tmp_path)["data"]
    assert "gradient of a call that was made before this recording began, not recorded (2 times)" in caplog.text


def test_calls_that_have_no_name_are_not_counted_as_dumped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    x = torch.ones(2, requires_grad=True)
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"))
    debugger.start()
    out = F.relu(x)
    for _ in range(2):
        out.backward(torch.ones(2), retain_graph=True)
    debugger.stop()
    assert f"Dumped {len(index(tmp_path)['data'])} calls" in caplog.text
    assert "second backward, for which this layout has no name (1 times)" in caplog.text


def test_a_path_that_cannot_be_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "file" / "dump"), step=[7])
    with pytest.raises(SettingsError, match="cannot hold a dump: Not a directory"):
        debugger.start()


def test_the_rank_names_the_folder_and_is_chosen(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, rank=[1, "3-4"]))
    for rank in (0, 3):
        debugger.start(rank_id=rank)
        torch.ones(2).abs()
        debugger.stop()
    assert [path.name for path in (tmp_path / "dump" / "step0").iterdir()] == ["rank3"]


def test_set_init_step_names_the_step(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"))
    debugger.set_init_step(70)
    debugger.start()
    torch.ones(2).abs()
    debugger.forward_backward_dump_end()
    assert (tmp_path / "dump" / "step70" / HERE / "dump.json").is_file()
    with pytest.raises(SettingsError, match="from 0; got -1"):
        PrecisionDebugger.set_init_step(-1)


def test_a_loader_tells_steps_and_ends_the_program_after_the_last(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, enable_dataloader=True, step=[1]))
    debugger.start()  # has no effect, and is told
    seen = 0
    with pytest.raises(Exception, match=r"^msprobe: exit after iteration 1$"):
        for batch in DataLoader(torch.arange(8.0).reshape(4, 2).unbind()):  # type: ignore[arg-type]
            seen += 1
            F.relu(batch)
    assert seen == 2
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["step1"]
    assert "Functional.relu.0.forward" in index(tmp_path, step=1)["data"]


def test_one_module_is_dumped_under_a_name_of_its_own(tmp_path: Path) -> None:
    net = make_net()
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"), task="tensor")
    debugger.start()
    msprobe.module_dump(net.block, "feed")
    train(net)
    msprobe.module_dump_end()
    F.relu(net.head.weight)
    debugger.stop()
    found = list(index(tmp_path)["data"])
    assert found == ["Module.feed.Block.forward.0", "Module.feed.Block.backward.0", "Functional.relu.0.forward"]
    with pytest.raises(SettingsError, match=r"takes a torch\.nn\.Module; got Tensor"):
        msprobe.module_dump(torch.ones(1), "x")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="a name for the module"):
        msprobe.module_dump(net, "")


def test_saved_variables_have_their_values_and_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PrecisionDebugger(dump_path=str(tmp_path / "dump"), task="tensor", level="debug")
    w = torch.ones(3, requires_grad=True)
    for _ in range(2):
        PrecisionDebugger.start()
        y = w.bfloat16().t() * 2
        unused = w * 3
        for _ in range(2):
            PrecisionDebugger.save({"a": [y, 3, None], "b": (w,)}, "thing")
        PrecisionDebugger.save(unused, "unused")
        PrecisionDebugger.save(y, "y", save_backward=False)
        PrecisionDebugger.save(object(), "what")
        y.sum().backward()
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
    data = index(tmp_path, step=1, file="debug.json")["data"]
    assert set(data) == {
        *("thing.0.debug", "thing.1.debug", "thing_grad.0.debug", "thing_grad.1.debug"),
        *("unused.0.debug", "unused_grad.0.debug", "y.0.debug"),
    }
    assert data["thing.1.debug"]["a"][1:] == [{"type": "int", "value": 3}, None]
    assert data["thing_grad.1.debug"]["a"][0]["Max"] == 1.0 and data["thing_grad.1.debug"]["a"][1:] == [None, None]
    assert data["thing_grad.0.debug"]["b"][0]["Max"] == 2.0
    assert data["unused_grad.0.debug"] is None
    file = tmp_path / "dump" / "step1" / HERE / "dump_tensor_data" / data["thing.0.debug"]["a"][0]["data_name"]
    assert torch.equal(torch.load(file, weights_only=True), torch.full((3,), 2, dtype=torch.bfloat16))
    assert "a object cannot be saved" in caplog.text
    assert not w._backward_hooks and not unused._backward_hooks


def test_save_at_another_level_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PrecisionDebugger(dump_path=str(tmp_path / "dump"))
    for _ in range(2):
        PrecisionDebugger.save(torch.ones(1), "x")
    assert caplog.text.count("level is 'L1'. Set level to 'debug'.") == 1
    assert not (tmp_path / "dump").exists()


def test_a_second_debugger_is_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = PrecisionDebugger(dump_path=str(tmp_path / "a"))
    assert PrecisionDebugger(dump_path=str(tmp_path / "a")) is first
    assert caplog.text == ""
    assert PrecisionDebugger(dump_path=str(tmp_path / "b")) is first
    assert "its settings stay" in caplog.text and first.config.dump_path == tmp_path / "a"


def test_a_debugger_with_wrong_settings_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UnknownSetting, match="Did you mean 'rank'"):
        PrecisionDebugger(write_config(tmp_path, ranks=[0]))
    assert PrecisionDebugger._instance is None


def test_without_a_debugger_its_methods_say_so() -> None:
    for method in (PrecisionDebugger.start, PrecisionDebugger.stop, PrecisionDebugger.step):
        with pytest.raises(SettingsError, match="there is no PrecisionDebugger yet"):
            method()


def test_seed_and_determinism_are_set_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    state = random.getstate()
    PrecisionDebugger(config_path=write_config(tmp_path))
    assert random.getstate() == state
    forget_debugger()
    PrecisionDebugger(config_path=write_config(tmp_path, seed=7))
    assert torch.initial_seed() == 7


def test_a_step_that_cannot_be_dumped_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"))
    debugger.start()
    debugger.stop()
    debugger.step()
    (tmp_path / "dump" / "step1").write_text("in the way")
    debugger.start()
    F.relu(torch.ones(2))
    debugger.stop()
    assert "Step 1 is not dumped" in caplog.text
    forget_debugger()
    with pytest.raises(SettingsError, match="a recording into"), capture(tmp_path / "run"):
        PrecisionDebugger(dump_path=str(tmp_path / "dump")).start()


def test_a_range_of_tokens_is_refused(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"))
    with pytest.raises(SettingsError, match="token_range"):
        debugger.start(token_range=[1, 2])


def test_a_killed_recorder_leaves_whole_files(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"), task="tensor")
    debugger.start()
    for _ in range(200):
        F.relu(torch.ones(3))
    for pid in recorders():
        os.kill(pid, signal.SIGKILL)
    with pytest.warns(CaptureIncomplete, match="the recorder has ended"):
        debugger.stop()
    data = index(tmp_path)["data"]
    values = tmp_path / "dump" / "step0" / HERE / "dump_tensor_data"
    assert all((values / name).is_file() for name in files_of(data))
    index(tmp_path, file="stack.json")


KILLED = """
import sys, torch, torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(dump_path=sys.argv[1], task="tensor")
debugger.start()
for number in range(300):
    F.relu(torch.full((5,), float(number)))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_program_leaves_every_call(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "dump")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        program.kill()
    (folder,) = (tmp_path / "dump" / "step0").iterdir()
    with (folder / "dump.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # held by its recorder until that has ended
    run = open_run(tmp_path / "dump")
    relus = [call for call in run.calls() if call.op == "Functional.relu"]
    assert [call.number for call in relus] == list(range(300))
    assert relus[299].outputs[0].numpy().tolist() == [299.0] * 5
    json.loads((folder / "stack.json").read_text())


def test_names_are_loaded_when_they_are_asked_for() -> None:
    from tensorprobe.legacy.msprobe.compare import compare

    assert {"PrecisionDebugger", "seed_all", "compare", "compare_distributed"} <= set(dir(msprobe))
    assert msprobe.compare is compare and callable(compare)
    with pytest.raises(AttributeError, match="no attribute 'Precision'"):
        msprobe.Precision  # noqa: B018

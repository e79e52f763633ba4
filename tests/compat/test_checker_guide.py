"""The guide of api_accuracy_checker followed step by step by a new user: a training script, JSON files, run_ut, two tables.

Each step is a process in a folder that holds the script and the reader's own program; on the CPU alone, and on the
simulated NPU, healthy and with a planted fault.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import api_accuracy_checker.run_ut as commands
from tensorprobe.errors import SettingsError, UnknownSetting
from tensorprobe.legacy.checker.config import CheckerConfig
from tests.builders.checker import read_strictly
from tests.compat.reading import read_csv
from tests.taps.scripts import environment, run_python, run_tool

pytestmark = pytest.mark.xdist_group("checker-guide")  # one worker, so that each script runs once

RUN_UT = Path(commands.__file__).with_name("run_ut.py")
FAULT = "conv-last-channel"
CONV = "Functional*conv2d*0"

MAIN = """\
import sys
from torch.utils.data import DataLoader
from checker_net import Training

import api_accuracy_checker.dump

training = Training(sys.argv[1])
for epoch in range(3):
    for number, (images, classes) in enumerate(DataLoader(training.data, batch_size=8)):
        print("iteration", epoch, number, flush=True)
        training.step(images, classes)
"""
"""Step 2 of the guide: one line is added to the training script."""

SWITCHED = """\
import sys
from checker_net import Training

from api_accuracy_checker.dump import msCheckerConfig
import api_accuracy_checker.dump as DP

msCheckerConfig.update_config(dump_path="my/dump/path", real_data=True, enable_dataloader=True, target_iter=1)
training = Training("cpu")
images, classes = training.data[:8]
DP.dump.set_dump_switch("ON")
training.model(images)
DP.dump.set_dump_switch("OFF")
training.step(images, classes)
for step in range(2):
    DP.dump.set_dump_switch("ON")
    training.step(images, classes)
    if step == 1:
        sys.exit(3)
"""
"""Data that no DataLoader gives, real values, two recordings of which the second replaces the first, and a sudden end."""

KILLED = """\
import os, signal
from torch.utils.data import DataLoader
from checker_net import Training
import api_accuracy_checker.dump
from tensorprobe.legacy.checker import dump

training = Training("cpu")
for number, (images, classes) in enumerate(DataLoader(training.data, batch_size=8)):
    training.step(images, classes)
    if number == 1:
        print(dump._watch._recording.guard._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Dumped(NamedTuple):
    """What a script has left in its folder."""

    folder: Path
    said: str
    errors: str

    @property
    def files(self) -> dict[str, Path]:
        return {kind: next(self.folder.glob(f"{kind}_info_*.json")) for kind in ("forward", "backward", "stack")}

    def read(self) -> dict[str, dict[str, Any]]:
        return {kind: read_strictly(path) for kind, path in self.files.items()}


def place(folder: Path, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("checker_net.py"), folder)
    (folder / "main.py").write_text(script)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the script of the guide on a device, once."""

    @functools.cache
    def train(device: str) -> Dumped:
        folder = place(tmp_path_factory.mktemp(device), MAIN)
        if device == "npu":
            done = run_tool(["sim", "--", sys.executable, "main.py", device], folder, code=1, cold=True)
        else:
            done = run_python(["main.py", device], folder, code=1)
        return Dumped(folder, done.stdout, done.stderr)

    return train


@pytest.fixture(scope="module")
def checked(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs run_ut.py on the dump of a device, once, in a folder that is not empty."""

    @functools.cache
    def check(device: str, fault: str | None = None) -> tuple[int, Path, str]:
        files = trained(device).files
        folder = tmp_path_factory.mktemp(f"{device}-out")
        (folder / "accuracy_checking_result.csv").write_text("of an earlier run")
        (folder / "notes.txt").write_text("mine")
        command: list[str | Path] = [RUN_UT, "-forward", files["forward"], "-backward", files["backward"]]
        if device == "cpu":
            done = run_python([*command, "--out_path", "./"], folder, code=None)
        else:
            more = [] if fault is None else ["--fault", fault]
            command += ["-save_error_data", "-jit_compile"]
            done = run_tool(["sim", *more, "--", sys.executable, *command], folder, code=None)
        return done.returncode, folder, done.stdout + done.stderr

    return check


def results(folder: Path) -> dict[str, tuple[str, str]]:
    table = read_csv(folder / "accuracy_checking_result.csv")
    return {row["API name"]: (row["Forward Test Success"], row["Backward Test Success"]) for row in table}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_the_second_iteration_is_recorded_and_training_ends(trained: Any, device: str) -> None:
    dumped = trained(device)
    assert dumped.said.split("\n")[:-1] == ["iteration 0 0", "iteration 0 1"]
    assert dumped.errors.rstrip().endswith("\nException: Model pretest: exit after iteration 1.")
    names = sorted(entry.name for entry in dumped.folder.iterdir() if entry.suffix != ".py" and entry.is_file())
    pid = names[0].removeprefix("backward_info_").removesuffix(".json")
    assert names == [f"{kind}_info_{pid}.json" for kind in ("backward", "forward", "stack")]
    assert not list(dumped.folder.glob(".api_accuracy_checker*"))


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_the_files_are_those_of_the_guide(trained: Any, device: str) -> None:
    held = trained(device).read()
    forward, backward, stack = held["forward"], held["backward"], held["stack"]
    assert list(forward) == list(stack)
    for name in (CONV, "Functional*relu*0", "Functional*dropout*0", "Functional*gelu*0", "Functional*cross_entropy*0"):
        assert name in forward and name in backward
    images, weight = forward[CONV]["args"][:2]
    assert (
        images["dtype"] == "torch.float32"
        and images["shape"] == [8, 1, 6, 6]
        and 0.5 <= images["Min"] < images["Max"] <= 1.5
    )
    assert (images["requires_grad"], weight["requires_grad"]) == (False, True)
    assert set(images) == {"type", "dtype", "shape", "Max", "Min", "requires_grad"}
    assert forward["Functional*relu*0"]["kwargs"] == {"inplace": {"type": "bool", "value": True}}
    assert [entry["shape"] for entry in backward[CONV]] == [[8, 4, 4, 4]]
    assert "checker_net.py, line " in stack[CONV][0] and "in forward, \n x = F.relu(self.conv(images)" in stack[CONV][0]
    assert not any(name.endswith("*1") for name in forward if "conv2d" in name), "more than one iteration"


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_run_ut_writes_two_tables_and_touches_nothing_else(trained: Any, checked: Any, device: str) -> None:
    code, folder, said = checked(device)
    assert code == 0, said
    assert sorted(path.name for path in folder.iterdir()) == [
        "accuracy_checking_details.csv", "accuracy_checking_result.csv", "notes.txt",
    ]  # fmt: skip
    assert (folder / "notes.txt").read_text() == "mine"
    table = read_csv(folder / "accuracy_checking_result.csv")
    assert list(table[0]) == ["API name", "Forward Test Success", "Backward Test Success", "Message"]
    assert [row["API name"] for row in table] == list(trained(device).read()["forward"])
    found = results(folder)
    assert found[CONV] == ("True", "True") and "False" not in {verdict for both in found.values() for verdict in both}
    details = {row["Npu Name"]: row for row in read_csv(folder / "accuracy_checking_details.csv")}
    assert f"{CONV}.forward.output.0" in details and f"{CONV}.backward.output.1" in details


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_questions_of_the_guide(checked: Any, device: str) -> None:
    """BFloat16 is no error; dropout passes although devices draw differently; half precision is checked in float32."""
    _, folder, said = checked(device)
    assert "unsupported ScalarType" not in said
    found = results(folder)
    assert found["Functional*relu6*0"] == found["Functional*gelu*0"] == ("True", "True")
    assert found["Functional*dropout*0"][0] == "True"
    details = {row["Npu Name"]: row for row in read_csv(folder / "accuracy_checking_details.csv")}
    dtypes = {
        name: (details[f"{name}.forward.output.0"]["Bench Dtype"], details[f"{name}.forward.output.0"]["NPU Dtype"])
        for name in ("Functional*relu6*0", "Functional*gelu*0", CONV)
    }
    assert dtypes == {
        "Functional*relu6*0": ("torch.float32", "torch.bfloat16"),
        "Functional*gelu*0": ("torch.float32", "torch.float16"),
        CONV: ("torch.float64", "torch.float32"),
    }


@pytest.mark.simulated
def test_a_planted_fault_is_flagged_and_its_data_saved(checked: Any) -> None:
    code, folder, said = checked("npu", FAULT)
    assert code == 1, said
    assert {name for name, both in results(folder).items() if "False" in both} == {CONV}
    assert results(folder)[CONV][0] == "False"
    details = {row["Npu Name"]: row for row in read_csv(folder / "accuracy_checking_details.csv")}
    assert details[f"{CONV}.forward.output.0"]["Pass"] == "False"
    saved = [
        path.relative_to(folder / "ut_error_data") for path in (folder / "ut_error_data").rglob("*") if path.is_file()
    ]
    assert {path.suffix for path in saved} >= {".py", ".safetensors"}
    assert all("conv2d" in str(path) for path in saved)
    assert f"ut_error_data/{next(str(path) for path in saved if path.suffix == '.py')}" in said


def test_without_a_loader_the_switch_decides_and_real_values_are_saved(tmp_path: Path) -> None:
    folder = place(tmp_path / "user", SWITCHED)
    out = folder / "my" / "dump" / "path"
    out.mkdir(parents=True)
    done = run_python(["main.py"], folder, code=3)
    dumped = Dumped(out, done.stdout, done.stderr)
    held = dumped.read()
    assert done.stderr.count("Recorded ") == 2 and "are replaced" in done.stderr
    steps = [name for name in held["forward"] if name.startswith("Functional*conv2d*")]
    assert (
        steps == ["Functional*conv2d*0", "Functional*conv2d*1"] == sorted(n for n in held["backward"] if "conv2d" in n)
    )
    entry = held["forward"][CONV]["args"][1]
    assert sorted(entry) == ["datapath", "requires_grad", "type"]
    weight = torch.load(entry["datapath"], weights_only=True)
    assert weight.shape == (4, 1, 3, 3) and 0 < float(weight.min()) < float(weight.max()) < 0.5
    assert Path(entry["datapath"]).parent == out / "forward_real_data"
    gradient = torch.load(held["backward"][CONV][0]["datapath"], weights_only=True)
    assert gradient.shape == (8, 4, 4, 4)
    shutil.move(out, tmp_path / "moved")
    moved = Dumped(tmp_path / "moved", "", "").files
    command = ["-m", "api_accuracy_checker.run_ut.run_ut", "-forward", moved["forward"], "-backward", moved["backward"]]
    checked = run_python(command, tmp_path, code=None)
    assert "real data" in checked.stdout
    assert results(tmp_path)[CONV] == ("True", "True"), checked.stdout
    assert not list(tmp_path.glob("ut_error_data"))


@pytest.mark.usefixtures("warm_processes")
def test_a_killed_program_leaves_whole_files(tmp_path: Path) -> None:
    folder = place(tmp_path, KILLED)
    program = subprocess.Popen(
        [sys.executable, "main.py"], cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert program.stdout is not None
    with program, program.stdout:
        guard = os.pidfd_open(int(program.stdout.readline()))
        try:
            assert select.select([guard], [], [], 60)[0], "the guard never ends"
        finally:
            os.close(guard)
    held = Dumped(folder, "", "").read()
    assert list(held["forward"]) == list(held["stack"])
    assert CONV in held["forward"] and CONV in held["backward"]
    assert not list(folder.glob(".*"))


SHORT = """\
from torch.utils.data import DataLoader
from api_accuracy_checker.dump import msCheckerConfig
msCheckerConfig.update_config(target_iter=2)
assert len(list(DataLoader(range(4), batch_size=2))) == 2
"""


def test_an_iteration_that_never_comes_is_told(tmp_path: Path) -> None:
    place(tmp_path, SHORT)
    done = run_python(["main.py"], tmp_path)
    assert "its DataLoader gave 2 batches, iteration 2 was never reached" in done.stderr
    assert not list(tmp_path.glob("*.json"))


SEVERAL = """\
import torch
from torch.utils.data import DataLoader
from api_accuracy_checker.dump import msCheckerConfig
msCheckerConfig.update_config(target_iter=[2, 0, 7], white_list=["relu", "abs"])
for batch in DataLoader(torch.rand(4, 2)):
    torch.relu(batch.abs() + 1)
"""


def test_iterations_of_a_list_have_a_folder_each_and_only_apis_of_the_white_list(tmp_path: Path) -> None:
    place(tmp_path, SEVERAL)
    done = run_python(["main.py"], tmp_path)
    assert "Not recorded: iterations [7]; the DataLoader gave 4 batches." in done.stderr
    found = sorted(tmp_path.rglob("forward_info_*.json"))
    assert [path.parent.name for path in found] == ["step0", "step2"]
    assert [sorted(json.loads(path.read_text())) for path in found] == [["Tensor*abs*0", "Torch*relu*0"]] * 2


def test_the_program_ends_after_the_last_iteration_of_a_list(tmp_path: Path) -> None:
    place(tmp_path, SEVERAL.replace("7", "1"))
    done = run_python(["main.py"], tmp_path, code=1)
    assert "Model pretest: exit after iteration 2." in done.stderr
    assert len(list(tmp_path.rglob("forward_info_*.json"))) == 3


@pytest.mark.parametrize("names", [("-forward", "absent.json", "-backward", "absent.json"), ("-forward", "x")])
def test_run_ut_says_what_is_missing(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from tensorprobe.legacy.checker.run_ut import main

    try:
        code = main(names)
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    said = capsys.readouterr().err
    assert "no file 'absent.json'" in said or "the following arguments are required: -backward" in said


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": ({"dump_pth": "."}, UnknownSetting, "no parameter 'dump_pth'. Did you mean 'dump_path'"),
    "absent": ({"dump_path": "nowhere"}, SettingsError, "'nowhere', which does not exist"),
    "file": ({"dump_path": __file__}, SettingsError, "which is a file"),
    "no path": ({"dump_path": 3}, SettingsError, "must be the path of a folder"),
    "text": ({"real_data": "True"}, SettingsError, "real_data is 'True'; it must be True or False"),
    "number": ({"enable_dataloader": 1}, SettingsError, "must be True or False"),
    "negative": ({"target_iter": -1}, SettingsError, "target_iter is -1"),
    "bool": ({"target_iter": True}, SettingsError, "target_iter is True"),
    "no iteration": ({"target_iter": []}, SettingsError, "target_iter is []"),
    "one name": ({"white_list": "relu"}, SettingsError, "a list of names of APIs"),
    "nothing": ({"error_data_path": ""}, SettingsError, "must be the path of a folder"),
}


@pytest.mark.parametrize(("given", "kind", "says"), WRONG.values(), ids=WRONG)
def test_update_config_says_what_is_wrong(
    given: dict[str, Any], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    config = CheckerConfig()
    before = vars(config).copy()
    with pytest.raises(kind) as raised:
        config.update_config(target_iter=5, **given) if "target_iter" not in given else config.update_config(**given)
    assert says in str(raised.value)
    assert vars(config) == before


def test_update_config_sets_what_is_right(tmp_path: Path) -> None:
    config = CheckerConfig()
    config.update_config(
        dump_path=tmp_path,
        real_data=True,
        enable_dataloader=False,
        target_iter=0,
        error_data_path="errors",
        white_list=["conv2d"],
    )
    assert vars(config) == {
        "dump_path": str(tmp_path), "real_data": True, "enable_dataloader": False, "target_iter": 0,
        "error_data_path": str(Path("errors").absolute()), "white_list": ["conv2d"],
    }  # fmt: skip

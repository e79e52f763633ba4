"""The dump of ptdbg_ascend: what stands on disk, and what happens when the functions are called in the wrong way."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ptdbg_ascend as ptdbg
from tensorprobe.errors import CaptureIncomplete, RunExists, SettingsError, UnknownSetting
from tests.compat.reading import Dump, read_dump


def dumped(step: Callable[[], Any], name: str = "npu_dump", **switch: Any) -> Dump:
    """The dump of one step; the package's own functions, as a script calls them."""
    ptdbg.set_dump_path(f"./{name}.pkl")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    ptdbg.set_dump_switch("ON", **switch)
    try:
        step()
    finally:
        ptdbg.set_dump_switch("OFF")
    prefix = "api_stack_" if switch.get("mode") == "api_stack" else ""
    return read_dump(Path("ptdbg_dump_v1.0/rank0", f"{prefix}{name}.pkl"))


def test_values_and_gradients_are_those_of_the_program() -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    w = torch.randn(6, 5, requires_grad=True)
    kept: list[Tensor] = []

    def step() -> None:
        y = F.linear(x, w)
        y.retain_grad()
        kept.append(y)
        y.pow(2).sum().backward()

    lines = dumped(step).lines
    (y,) = kept
    expected = {
        "Functional_linear_0_forward_input.0": x,
        "Functional_linear_0_forward_input.1": w,
        "Functional_linear_0_forward_output": y,
        "Functional_linear_0_backward_input.0": y.grad,
        "Functional_linear_0_backward_output.0": x.grad,
        "Functional_linear_0_backward_output.1": w.grad,
    }
    for name, tensor in expected.items():
        assert tensor is not None
        np.testing.assert_array_equal(lines[name].array, tensor.detach().numpy())
        assert lines[name].dtype == "torch.float32"
        held = tensor.detach().double()
        np.testing.assert_allclose(lines[name].statistics, [held.max(), held.min(), held.mean()], rtol=1e-6)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.randn(4, 6).bfloat16(), "float32"),
        (torch.randn(4, 6).half(), "float16"),
        (torch.randn(4, 6).double(), "float64"),
        (torch.randn(4, 6, dtype=torch.complex64), "complex64"),
        (torch.randn(4, 6).t(), "float32"),
        (torch.randn(4, 6, 2).permute(2, 0, 1), "float32"),
        (torch.randn(8, 6)[::2], "float32"),
        (torch.randn(4, 1).expand(4, 6), "float32"),
        (torch.randn(3000, 4000), "float32"),
    ],
)
def test_any_tensor_is_written_row_major_in_a_dtype_numpy_has(tensor: Tensor, dtype: str) -> None:
    line = dumped(lambda: torch.clone(tensor)).lines["Torch_clone_0_forward_input.0"]
    assert line.dtype == str(tensor.dtype)
    assert str(line.array.dtype) == dtype
    wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    np.testing.assert_array_equal(line.array, wide.numpy())


@pytest.mark.parametrize("tensor", [torch.randn(()), torch.randn(0, 3), torch.arange(3)])
def test_numbers_and_integers_are_dumped_with_the_filter_off_only(tensor: Tensor) -> None:
    assert not dumped(lambda: torch.clone(tensor)).lines
    line = dumped(lambda: torch.clone(tensor), filter_switch="OFF").lines["Torch_clone_0_forward_input.0"]
    np.testing.assert_array_equal(line.array, tensor.numpy())


def test_float8_is_widened_and_keeps_its_dtype_in_the_pkl() -> None:
    tensor = torch.randn(16).to(torch.float8_e4m3fn)
    line = dumped(lambda: torch.clone(tensor)).lines["Torch_clone_0_forward_input.0"]
    assert (line.dtype, str(line.array.dtype)) == ("torch.float8_e4m3fn", "float32")
    np.testing.assert_array_equal(line.array, tensor.float().numpy())


def test_a_tensor_larger_than_the_ring_takes_at_once_is_whole() -> None:
    tensor = torch.arange(10_000_000, dtype=torch.float32)
    line = dumped(lambda: tensor.neg()).lines["Tensor_neg_0_forward_output"]
    np.testing.assert_array_equal(line.array, -tensor.numpy())


def test_nan_and_infinity_in_the_statistics() -> None:
    lines = dumped(
        lambda: [
            torch.clone(t)
            for t in (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.tensor([math.inf, -math.inf]))
        ]
    ).lines
    assert all(math.isnan(figure) for figure in lines["Torch_clone_0_forward_output"].statistics)
    assert lines["Torch_clone_1_forward_output"].statistics == [math.inf, 1.0, math.inf]
    high, low, mean = lines["Torch_clone_2_forward_output"].statistics
    assert (high, low) == (math.inf, -math.inf) and math.isnan(mean)


def test_nested_inputs_have_a_level_more() -> None:
    lstm = nn.LSTM(3, 4)
    lines = dumped(lambda: lstm(torch.randn(5, 2, 3))).lines
    assert {"VF_lstm_0_forward_input.1.0", "VF_lstm_0_forward_input.1.1", "VF_lstm_0_forward_output.0"} <= set(lines)


def test_integers_and_scalars_only_when_the_filter_is_off() -> None:
    def step() -> None:
        index = torch.tensor([2, 0])
        F.embedding(index, torch.randn(3, 4))
        torch.randn(2, 3).transpose(0, 1).clamp(min=0.5).gt(0)

    assert not [line for line in dumped(step).lines.values() if line.dtype != "torch.float32"]
    lines = dumped(step, filter_switch="OFF").lines
    assert lines["Functional_embedding_0_forward_input.0"].dtype == "torch.int64"
    assert lines["Functional_embedding_0_forward_input.0"].array.tolist() == [2, 0]
    one = lines["Tensor_transpose_0_forward_input.2"]
    assert (one.dtype, one.shape, one.statistics, one.array.item()) == ("<class 'int'>", "[]", [1, 1, 1], 1)
    assert lines["Tensor_clamp_0_forward_input.kwargs.min"].dtype == "<class 'float'>"
    assert lines["Tensor_gt_0_forward_output"].dtype == "torch.bool"
    order = [name for name in lines if name.startswith("Tensor_transpose_0_forward")]
    assert order == [f"Tensor_transpose_0_forward_{slot}" for slot in ("input.0", "input.1", "input.2", "output")]


def test_changed_arguments_do_not_give_the_result_an_index() -> None:
    norm = nn.BatchNorm1d(3)
    lines = dumped(lambda: norm(torch.randn(4, 3))).lines
    assert {"Functional_batch_norm_0_forward_output", "Functional_batch_norm_0_forward_output.changed.1"} <= set(lines)


def test_stacks_are_innermost_first_and_name_this_file() -> None:
    def inner() -> Tensor:
        return torch.ones(2).neg()

    dump = dumped(lambda: inner(), mode="api_stack")
    frames = dump.stacks["Tensor_neg_0_forward"]
    assert [frame[2] for frame in frames[:2]] == ["inner", "<lambda>"]
    assert frames[0][0] == __file__ and frames[0][3] == "return torch.ones(2).neg()"
    assert Path(frames[0][0]).read_text().splitlines()[int(frames[0][1]) - 1].strip() == frames[0][3]


def test_recomputed_forwards_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(4, 4)

    def step() -> None:
        checkpoint(
            lambda x: layer(x).relu(), torch.randn(2, 4, requires_grad=True), use_reentrant=False
        ).sum().backward()

    with caplog.at_level(logging.INFO):
        lines = dumped(step).lines
    assert {name.split("_forward")[0] for name in lines if "linear" in name and "forward" in name} == {
        "Functional_linear_0"
    }
    assert "Functional_linear_0_backward_output.1" in lines
    assert "recomputed call" in caplog.text


def test_a_second_run_replaces_the_first_and_nothing_of_it_is_left() -> None:
    dumped(lambda: torch.randn(3).neg().abs())
    second = dumped(lambda: torch.randn(3).neg())
    assert {name.partition("_0_")[0] for name in second.files} == {"Tensor_neg"}
    stack = dumped(lambda: torch.randn(3).neg(), mode="stack")
    assert not stack.files and not Path("ptdbg_dump_v1.0/rank0/npu_dump").exists()


def test_other_files_in_the_place_are_not_removed() -> None:
    folder = Path("ptdbg_dump_v1.0/rank0/npu_dump")
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(RunExists, match=r"holds what is no dump's: thesis.txt. Nothing was removed"):
        dumped(lambda: None)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_disk_that_refuses_is_told_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    ptdbg.set_dump_switch("ON")
    torch.randn(3).neg()
    shutil.rmtree("ptdbg_dump_v1.0/rank0")
    result = torch.ones(3).neg()
    with pytest.warns(CaptureIncomplete, match="No such file"):
        ptdbg.set_dump_switch("OFF")
    assert result.tolist() == [-1, -1, -1]


@pytest.mark.usefixtures("warm_processes")
def test_a_killed_program_leaves_a_dump_whose_lines_all_have_their_files(tmp_path: Path) -> None:
    script = (
        "import os, signal, torch\nfrom ptdbg_ascend import *\nfrom tensorprobe.legacy.ptdbg import dump\n"
        "set_dump_path('npu_dump.pkl')\nregister_hook(torch.nn.Identity(), acc_cmp_dump)\nset_dump_switch('ON')\n"
        "print(dump._state.probe._sink._writer.recorder_pid, flush=True)\n"
        "input()\nfor _ in range(200): torch.randn(64).neg()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    with program:
        assert program.stdout is not None
        recorder = os.pidfd_open(int(program.stdout.readline()))
        program.communicate(b"\n")
    assert program.returncode == -signal.SIGKILL
    select.select([recorder], [], [])  # it writes what it was handed, and ends
    os.close(recorder)
    pkl = tmp_path / "ptdbg_dump_v1.0/rank0/npu_dump.pkl"
    names = [json.loads(line)[0] for line in pkl.read_text().splitlines()]
    assert len([name for name in names if name.startswith("Tensor_neg")]) >= 2 * 199
    assert all((pkl.with_suffix("") / f"{name}.npy").is_file() for name in names)


def test_the_rank_that_is_given_names_the_folder() -> None:
    ptdbg.set_dump_path("./d/npu_dump.pkl", dump_tag="all")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump, rank=10)
    assert Path("d/all_v1.0/rank10").is_dir()


def test_the_launcher_knows_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    assert [folder.name for folder in Path("ptdbg_dump_v1.0").iterdir()] == ["rank3"]


def test_without_a_path_the_dump_is_anonymous(caplog: pytest.LogCaptureFixture) -> None:
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    assert "register_hook before set_dump_path" in caplog.text
    ptdbg.set_dump_switch("ON")
    torch.randn(2).neg()
    ptdbg.set_dump_switch("OFF")
    assert "Tensor_neg_0_forward_output" in read_dump(Path("ptdbg_dump_v1.0/rank0/anonymous.pkl")).lines


def test_a_switch_before_register_hook_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.set_dump_switch("ON")
    assert "before register_hook" in caplog.text
    torch.randn(2).neg()
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    torch.randn(2).abs()
    ptdbg.set_dump_switch("OFF")
    names = read_dump(Path("ptdbg_dump_v1.0/rank0/npu_dump.pkl")).lines
    assert "Tensor_abs_0_forward_output" in names and not any("neg" in name for name in names)


def test_off_without_on_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ptdbg.set_dump_switch("OFF")
    assert "no dump is on" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"switch": "on"}, r'takes "ON" or "OFF"; got \'on\''),
        ({"mode": "rangee"}, r"mode is 'rangee'; it must be one of all, list.*Did you mean 'range'\?"),
        ({"mode": "list"}, r"mode 'list' needs at least one name in scope; got 0"),
        ({"mode": "range", "scope": ["Tensor_abs_1_forward"]}, r"needs two names"),
        ({"mode": "stack", "scope": ["Tensor_abs_1_forward"]}, r"needs two names.* or none"),
        ({"mode": "acl", "scope": []}, r"needs exactly one name"),
        ({"mode": "list", "scope": ["Tensor_abs"]}, r"'Tensor_abs', which is not the name of a call"),
        (
            {"mode": "list", "scope": ["Conv_abs_1_forward"]},
            r"not the name of a call.*\n.*Prefixes: Functional, Tensor",
        ),
        ({"mode": "list", "scope": "Tensor_abs_1_forward"}, r"takes a list of names of calls"),
        ({"mode": "api_list"}, r"needs names of APIs"),
        ({"mode": "api_list", "api_list": "relu"}, r"takes a list of names of APIs"),
        ({"filter_switch": "off"}, r"filter_switch is 'off'"),
        ({"dump_mode": "forwards"}, r"dump_mode is 'forwards'"),
    ],
)
def test_a_wrong_switch_is_refused_before_anything_happens(arguments: dict[str, Any], message: str) -> None:
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    with pytest.raises(SettingsError, match=message):
        ptdbg.set_dump_switch(**{"switch": "ON", **arguments})
    assert list(Path("ptdbg_dump_v1.0/rank0").iterdir()) == []


def test_wrong_arguments_of_register_hook_and_set_dump_path() -> None:
    with pytest.raises(SettingsError, match="takes the path of a pkl file"):
        ptdbg.set_dump_path("")
    with pytest.raises(SettingsError, match=r"is a folder. Name the file too"):
        ptdbg.set_dump_path(".")
    with pytest.raises(SettingsError, match="dump_tag"):
        ptdbg.set_dump_path("./a.pkl", dump_tag="../up")
    with pytest.raises(SettingsError, match=r"takes a torch.nn.Module as its first argument; got int"):
        ptdbg.register_hook(3, ptdbg.acc_cmp_dump)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="takes acc_cmp_dump"):
        ptdbg.register_hook(nn.Identity(), print)
    with pytest.raises(UnknownSetting, match=r"no argument 'rnak'. Did you mean 'rank'\?"):
        ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump, rnak=1)
    with pytest.raises(SettingsError, match="rank is -1"):
        ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump, rank=-1)
    with pytest.raises(SettingsError, match="dump_config"):
        ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump, dump_mode="acl")
    with pytest.raises(SettingsError, match=r"no file 'xxx/a.npy'"):
        ptdbg.set_backward_input(["xxx/a.npy"])


def test_an_api_that_torch_does_not_have_is_told_at_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dump = dumped(lambda: torch.randn(2, 3).permute(1, 0), mode="list", scope=["Tensor_permut_1_forward"])
    assert "torch has no Tensor.permut. Did you mean 'permute'?" in caplog.text
    assert any("nothing matched 'Tensor.permut.1.forward'" in str(warning.message) for warning in caught)
    assert not dump.lines


def test_a_name_that_cannot_be_a_file_stays_inside_the_folder(tmp_path: Path) -> None:
    from tensorprobe.legacy.layouts.dump_files import DumpFiles
    from tensorprobe.legacy.layouts.targets import PtdbgTarget, prepare_target
    from tensorprobe.model.event import Event, SlotEvent
    from tensorprobe.numerics.summary import Moments
    from tensorprobe.record.step_files import Stored

    form = PtdbgTarget(str(tmp_path / "d" / "x.pkl"), str(tmp_path / "d" / "x"))
    prepare_target(form)
    files = DumpFiles(form, 0)
    slots, stored = [], []
    for key in ("../../../escaped", "a/b", "a_b", "n" * 400):
        number = files.tensors.store(memoryview(b"\0\0\0\0"), "")
        slots.append(SlotEvent(f"output.{key}", "float32", (1,), token=0))
        stored.append(Stored(Moments(0, 0, 0, 0, 0, 0), "", 4, number))
    files.call(Event("Torch.f.0.forward", slots=slots), stored)
    files.finish(None, os.getpid())
    assert len(read_dump(tmp_path / "d" / "x.pkl").lines) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    assert files.tensors._held == {}

"""`ptdbg_ascend.parse`: the stack and the statistics of one call, on stdout."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from tensorprobe.errors import NotFound, RunNotFound, SettingsError
from tensorprobe.legacy.ptdbg.parsing import parse
from tests.builders.ptdbg import Line, bare, number, stack, tensor, write_rank
from tests.compat.tiny_net import CONV, STACK, X, tensors, write

NORM = "Torch_batch_normal_1_forward"


@pytest.fixture
def pkl() -> Path:
    lines = [
        tensor("Torch_batch_normal_10_forward_input.0", X),
        stack(NORM, *STACK),
        tensor(f"{NORM}_input.0", X),
        number(f"{NORM}_input.1", 3),
        tensor(f"{NORM}_output", X * 1000),
        tensor("Torch_batch_normal_1_backward_input.0", X),
        bare("Tensor_add_0_forward_output", X),
    ]
    return write_rank(Path(), lines)


def test_the_stack_and_each_tensor_in_columns(pkl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse("./npu_dump.pkl", NORM)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        NORM,
        "  called at, innermost first:",
        "    net.py:12 in forward: y = F.relu(x)",
        "    train.py:88 in main: loss = net(x)",
        "  name                                  dtype          shape   max   min    mean",
        f"  {NORM}_input.0  torch.float32  [4, 6]  2     -1     0.5",
        f"  {NORM}_input.1  <class 'int'>  []      3     3      3",
        f"  {NORM}_output   torch.float32  [4, 6]  2000  -1000  500",
    ]


def test_a_tensor_alone_comes_with_the_stack(pkl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse(pkl, f"{NORM}_input.0")
    out = capsys.readouterr().out
    assert f"{NORM}_input.0" in out and "net.py:12" in out
    assert f"{NORM}_output" not in out and f"{NORM}_input.1" not in out
    parse(pkl, f"{NORM}_input")
    out = capsys.readouterr().out
    assert f"{NORM}_input.0" in out and f"{NORM}_input.1" in out and f"{NORM}_output" not in out


def test_without_a_direction_both_are_shown(pkl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse(pkl, "Torch_batch_normal_1")
    out = capsys.readouterr().out
    assert f"{NORM}_output" in out and "Torch_batch_normal_1_backward_input.0" in out
    assert "normal_10" not in out


def test_neither_values_nor_a_stack_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    pkl = write(Path("npu_dump.pkl"), tensors())
    shutil.rmtree("npu_dump")
    parse(pkl, CONV)
    out = capsys.readouterr().out
    assert "no stack in this file" in out
    assert f"{CONV}_input.1  torch.float32  [4, 6]  4" in out


def test_what_has_no_statistics_says_so(pkl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse(pkl, "Tensor_add_0_forward")
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["N/A"] * 3


def test_nan_and_infinity_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pkl = write_rank(Path(), [tensor(f"{NORM}_output", [np.nan, 1]), tensor(f"{NORM}_input.0", [np.inf, 1])])
    parse(pkl, NORM)
    out = capsys.readouterr().out
    assert "nan" in out and "inf" in out


def test_a_file_with_stacks_only(capsys: pytest.CaptureFixture[str]) -> None:
    parse(write_rank(Path(), [stack(NORM, *STACK)]), NORM)
    assert "net.py:12 in forward" in capsys.readouterr().out


def test_the_nearest_names_are_told(pkl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        NotFound, match=r"(?s)no call 'Torch_batch_norm_1_forward' in .*Nearest: .*Torch_batch_normal_1_forward"
    ):
        parse(pkl, "Torch_batch_norm_1_forward")
    with pytest.raises(NotFound, match=r"It holds Torch_batch_normal_10_forward, "):
        parse(pkl, "xyz")
    assert capsys.readouterr().out == ""


def test_lines_that_cannot_be_read_are_counted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pkl = write_rank(Path(), [Line(b""), Line(b"{]"), tensor(f"{NORM}_output", X), Line(b'["x", 1')])
    caplog.set_level(logging.WARNING)
    parse(pkl, NORM)
    assert f"{NORM}_output" in capsys.readouterr().out
    assert "2 lines of 'npu_dump.pkl' cannot be read" in caplog.text


def test_a_hostile_stack_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    pkl = write_rank(Path(), [stack(NORM, ["a\x1b[31m\n.py", "1", "f", "x"]), tensor(f"{NORM}_output", X)])
    parse(pkl, NORM)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 5


@pytest.mark.parametrize(
    ("path", "name", "error"),
    [
        ("nowhere.pkl", NORM, RunNotFound),
        ("npu_dump", NORM, SettingsError),
        (3, NORM, SettingsError),
        ("npu_dump.pkl", "", SettingsError),
        ("npu_dump.pkl", None, SettingsError),
    ],
)
def test_wrong_arguments_are_told(pkl: Path, path: object, name: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse(path, name)  # type: ignore[arg-type]

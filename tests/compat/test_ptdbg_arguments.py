"""The arguments of `ptdbg_ascend.compare`: a mistake is told before anything is read or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorprobe.errors import RunNotFound, SettingsError, UnknownSetting
from tensorprobe.legacy.ptdbg.compare import compare
from tests.compat.tiny_net import CONV, STACK, dumps, tensors


@pytest.fixture(autouse=True)
def output() -> Path:
    Path("output").mkdir()
    return Path("output")


def test_stack_mode_must_fit_the_files() -> None:
    with_stacks = dumps(tensors(), tensors(), "api_stack_", stacks={CONV: STACK})
    plain = dumps(tensors(), tensors())
    mixed = {**plain, **{key: value for key, value in with_stacks.items() if key.startswith("bench")}}
    with pytest.raises(SettingsError, match="contains stack information, please turn on the stack_mode"):
        compare(with_stacks, "output")
    with pytest.raises(SettingsError, match="does not contain stack information, please turn off the stack_mode"):
        compare(plain, "output", stack_mode=True)
    for mode in (False, True):
        with pytest.raises(
            SettingsError, match="The dump mode of the two files is not same, please check the dump files"
        ):
            compare(mixed, "output", stack_mode=mode)
    folders = {f"{side}_pkl_path": side for side in ("npu", "bench")}
    for side in folders.values():
        Path(side, f"{side}_dump.pkl").unlink()
    with pytest.raises(SettingsError, match="please turn on the stack_mode"):
        compare(folders, "output")
    assert [*Path("output").iterdir()] == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"npu_plk_path": "x"}, UnknownSetting, "Did you mean 'npu_pkl_path'"),
        ({"npu_pkl_path": None}, SettingsError, "npu_pkl_path is not given"),
        ({"npu_pkl_path": None, "bench_pkl_path": None}, SettingsError, "npu_pkl_path and bench_pkl_path are not"),
        ({"npu_pkl_path": 3}, SettingsError, "npu_pkl_path is 3; it must be a path"),
        ({"bench_dump_data_dir": ["x"]}, SettingsError, "it must be a path"),
        ({"bench_dump_data_dir": "nowhere"}, SettingsError, "bench_dump_data_dir 'nowhere' is no folder"),
        ({"npu_pkl_path": "nowhere.pkl"}, RunNotFound, "nowhere.pkl"),
        ({"is_print_compare_log": "yes"}, SettingsError, "is_print_compare_log is 'yes'"),
    ],
)
def test_wrong_parameters_are_told(change: dict[str, Any], error: type[Exception], words: str) -> None:
    param = {**dumps(tensors(), tensors()), **change}
    with pytest.raises(error) as raised:
        compare(param, "output")
    assert words in str(raised.value)
    assert [*Path("output").iterdir()] == []


@pytest.mark.parametrize(
    ("folder", "more", "words"),
    [
        ("new/out", {}, "does not exist. Make it:   mkdir -p new/out"),
        ("npu/npu_dump.pkl", {}, "is a file"),
        (None, {}, "output_path is None"),
        ("output", {"stack_mode": "True"}, "stack_mode is 'True'; it must be True or False"),
        ("output", {"auto_analyze": 1}, "auto_analyze is 1"),
        ("output", {"suffix": "../x"}, "suffix is '../x'"),
    ],
)
def test_wrong_arguments_are_told(folder: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as raised:
        compare(dumps(tensors(), tensors()), folder, **more)
    assert words in str(raised.value)


def test_the_parameters_must_be_a_dict() -> None:
    with pytest.raises(SettingsError, match="the first argument is str"):
        compare("npu_dump.pkl", "output")  # type: ignore[arg-type]

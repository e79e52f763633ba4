"""config.json of msprobe: what is taken, and every wrong setting by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.errors import SettingsError, UnknownSetting
from tensorprobe.legacy.msprobe.config import DumpConfig, read_config
from tensorprobe.legacy.wrapped import at_risk, closed, shipped_ops

Json = dict[str, Any]

WRONG: list[tuple[Json, type[Exception], str]] = [
    ({"taks": "tensor"}, UnknownSetting, r"no setting 'taks' in '.*config.json', line \d+. Did you mean 'task'\?"),
    (
        {"task": "tensors"},
        SettingsError,
        r'task is "tensors" in .*, line 2; it must be one of .* Did you mean \'tensor\'',
    ),
    ({"task": "diff_check", "diff_check": {}}, SettingsError, "not part of this version; there are statistics"),
    ({"level": "L3"}, SettingsError, 'level is "L3".*must be one of L0, L1, L2, mix, debug'),
    ({"rank": "all"}, SettingsError, r'rank is "all".*numbers and ranges, such as \[0, "4-6"\]'),
    ({"step": ["6-4"]}, SettingsError, "step is .*the range '6-4' is empty"),
    ({"step": [1.5]}, SettingsError, "step is .*'?1.5'? is not a number"),
    ({"dump_path": 3}, SettingsError, "dump_path is 3.*the path of a folder"),
    ({"dump_path": None}, SettingsError, "there is no dump_path in"),
    ({"enable_dataloader": "yes"}, SettingsError, "enable_dataloader is .*true or false"),
    ({"seed": 1.5}, SettingsError, "seed is 1.5.*a whole number"),
    ({"is_deterministic": 1}, SettingsError, "is_deterministic is 1.*true or false"),
    ({"dump_enable": False}, SettingsError, "dump_enable is false.*not part of this version"),
    ({"load": {"path": "x"}}, SettingsError, "load is .*not part of this version"),
    ({"statistics": []}, SettingsError, "statistics is .*an object with the settings of that task"),
    ({"statistics": {"lists": []}}, UnknownSetting, "no setting 'lists'.*Did you mean 'list'"),
    ({"statistics": {"file_format": "npy"}}, UnknownSetting, "no setting 'file_format'"),
    ({"statistics": {"list": "relu"}}, SettingsError, 'list is "relu".*a list of names'),
    ({"statistics": {"scope": ["Tensor.add.0.forward"]}}, SettingsError, "scope has 1 names; it takes two"),
    ({"statistics": {"data_mode": ["all", "input"]}}, SettingsError, "data_mode is .*'all' is everything already"),
    ({"statistics": {"data_mode": ["inputs"]}}, SettingsError, "data_mode is .*Did you mean 'input'"),
    ({"statistics": {"summary_mode": "xor"}}, SettingsError, "summary_mode is .*one of statistics, md5"),
    ({"statistics": {"slice": [1]}}, SettingsError, "slice is .*not part of this version; leave it out"),
    ({"tensor": {"file_format": "bin"}}, SettingsError, "file_format is .*one of pt, npy"),
    ({"tensor": {"online_run_ut": True}}, SettingsError, "online_run_ut is true.*not part of this version"),
    ({"overflow_check": {"overflow_nums": "1"}}, SettingsError, "overflow_nums is .*a whole number"),
    ({"overflow_check": {"overflow_nums": 0}}, SettingsError, "overflow_nums is 0.*from 1, or -1 for no end"),
    (
        {"task": "overflow_check", "overflow_check": {"list": ["relu"]}},
        SettingsError,
        "task is 'overflow_check' and list is set",
    ),
    (
        {"task": "overflow_check", "overflow_check": {"data_mode": ["forward"]}},
        SettingsError,
        "task is 'overflow_check' and data_mode is set",
    ),
    (
        {"level": "L2", "statistics": {"scope": ["a.0.forward", "b.0.forward"]}},
        SettingsError,
        "level is 'L2' and scope is set",
    ),
    ({"level": "debug", "task": "structure"}, SettingsError, "level is 'debug' and task is 'structure'"),
    ({"level": "L0", "task": "run_ut"}, SettingsError, "task is 'run_ut' and level is 'L0'"),
]


@pytest.mark.parametrize(("settings", "error", "message"), WRONG, ids=[json.dumps(row[0])[:60] for row in WRONG])
def test_a_wrong_setting_is_named(settings: Json, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "statistics", "dump_path": "./dump", **settings}, indent=1))
    with pytest.raises(error, match=message) as raised:
        read_config(str(path))
    assert type(raised.value) is error


def test_a_config_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.json' cannot be read"):
        read_config(tmp_path / "absent.json")
    (tmp_path / "config.json").write_text('{"task": "tensor"\n "level": "L1"}')
    with pytest.raises(SettingsError, match=r"config\.json', line 2 is no JSON"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SettingsError, match="no JSON object"):
        read_config(tmp_path / "config.json")
    with pytest.raises(SettingsError, match="config_path is 3"):
        read_config(3)  # type: ignore[arg-type]


def test_the_settings_that_the_older_tool_ships_are_taken(tmp_path: Path) -> None:
    shipped = {
        "task": "statistics",
        "dump_path": "",
        "rank": [],
        "step": [],
        "level": "L1",
        "enable_dataloader": False,
        "async_dump": False,
        "extra_info": True,
        "risk_level": "FOCUS",
        "precision": "low",
        "tensor": {
            "scope": [],
            "list": [],
            "data_mode": ["all"],
            "file_format": "npy",
            "online_run_ut": False,
            "port": -1,
        },
        "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
        "free_benchmark": {"fuzz_device": "npu"},
    }
    (tmp_path / "config.json").write_text(json.dumps(shipped))
    read = read_config(tmp_path / "config.json", dump_path="here", step=["4-6", 9], task="tensor")
    wrapped = at_risk(closed(shipped_ops()), "FOCUS")
    expected = DumpConfig(task="tensor", dump_path=Path("here"), step=(4, 5, 6, 9), file_format="npy", wrapped=wrapped)
    assert read == expected
    assert read_config(tmp_path / "config.json", dump_path="x", task="acc_check").task == "run_ut"
    assert read_config() == DumpConfig(wrapped=wrapped)


def test_what_is_named_is_dumped_whatever_its_risk(tmp_path: Path) -> None:
    assert "Tensor.transpose" not in read_config(dump_path="here").wrapped
    assert "Tensor.transpose" in read_config(dump_path="here", risk_level="ALL").wrapped
    core = read_config(dump_path="here", risk_level="CORE").wrapped
    assert "Functional.linear" in core and "Functional.gelu" not in core
    (settings := tmp_path / "config.json").write_text('{"dump_path": "here", "statistics": {"list": ["transpose"]}}')
    assert "Tensor.transpose" in read_config(settings).wrapped

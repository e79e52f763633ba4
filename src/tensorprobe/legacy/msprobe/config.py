"""config.json: every field in one table, checked, with the fields that were given to PrecisionDebugger over it.

In: a file that a user wrote. Out: a `DumpConfig`, or SettingsError with the field, its line and what it may be. A field
that nobody knows is an error; one that the published tool has and that would change nothing here is taken and has no effect.
Importing this imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.files import read_settings
from tensorprobe.legacy.layouts.targets import MSPROBE_PARTS, MsprobeTarget
from tensorprobe.legacy.wrapped import RISK_LEVELS, at_risk, read_list
from tensorprobe.settings import parse_numbers

TASKS = ("statistics", "tensor", "structure", "run_ut", "overflow_check", "grad_probe", "free_benchmark")
LEVELS = ("L0", "L1", "L2", "mix", "debug")
_SAME_TASK = {"acc_check": "run_ut"}
_OTHER_TASKS = ("diff_check", "nan_check", "exception_dump")
"""Tasks of the published tool that are not here; their sections may stand in a config.json."""
PERTURBATIONS = ("improve_precision", "bit_noise", "add_noise", "no_change", "to_cpu")
_DATA_MODES = ("all", "forward", "backward", "input", "output")
_DEFAULT_PATH = "./dump_path"


@dataclass(frozen=True)
class DumpConfig:
    """What is to be dumped, where, and when. An empty list of ranks, steps or names means all of them."""

    task: str = "statistics"
    dump_path: Path = Path(_DEFAULT_PATH)
    level: str = "L1"
    rank: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    enable_dataloader: bool = False
    seed: int | None = None
    is_deterministic: bool = False
    extra_info: bool = True
    precision: str = "low"
    scope: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    parts: tuple[str, ...] = MSPROBE_PARTS
    summary_mode: str = "statistics"
    file_format: str = "pt"
    tensor_list: tuple[str, ...] = ()
    overflow_nums: int = 1
    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    error_data_path: Path = Path("./")
    grad_level: str = "L1"
    param_list: tuple[str, ...] = ()
    bounds: tuple[float, ...] = (-1, 0, 1)
    pert_mode: str = PERTURBATIONS[0]
    fuzz_stage: str = "forward"
    wrapped: frozenset[str] = frozenset()
    """The APIs to dump: those of `support_wrap_ops`, a file of that name, or of the one that ships, at `risk_level`."""
    excluded: frozenset[str] = frozenset()
    """What that file leaves out of the families that are dumped whole."""


def read_config(config_path: str | os.PathLike[str] | None = None, **given: Any) -> DumpConfig:
    """The settings of a config.json; what is given beside it, and is not None, comes before what the file says."""
    text, values = _read(config_path)
    where = "" if config_path is None else f" in '{config_path}'"

    def locate(key: str) -> str:
        line = next((n for n, line in enumerate(text.splitlines(), start=1) if f'"{key}"' in line), 0)
        return f"{where}, line {line}" if line else where

    own = _check(values, {**_FIELDS, **_SECTIONS}, locate)
    own |= _check({key: value for key, value in given.items() if value is not None}, _FIELDS, lambda _: "")
    task = own.get("task", "statistics")
    names = [name for name in (task, *_SAME_TASK) if _SAME_TASK.get(name, name) == task]
    for name in _SECTIONS:
        section = own.pop(name, None) or {}
        if name in names:
            own |= section
    if config_path is not None and "dump_path" not in own:
        raise SettingsError(f'there is no dump_path{where}: say where the dump is to go, "dump_path": "./dump".')
    wrapped, excluded = read_list(own.pop("support_wrap_ops", None))
    risk_level = own.pop("risk_level", "FOCUS")
    if not own.get("scope") and not own.get("list"):  # what is asked for by name is dumped, whatever its risk
        wrapped = at_risk(wrapped, risk_level)
    return _consistent(DumpConfig(**own, wrapped=wrapped, excluded=excluded))


def _read(config_path: str | os.PathLike[str] | None) -> tuple[str, dict[str, Any]]:
    if config_path is None:
        return "", {}
    if not isinstance(config_path, (str, os.PathLike)):
        raise SettingsError(f"config_path is {config_path!r}; it must be the path of a config.json.")
    try:
        text = read_settings(config_path).decode("utf-8")
        values = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"'{config_path}' cannot be read: {error}.") from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"'{config_path}', line {error.lineno} is no JSON: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"'{config_path}' is no JSON: {error}.") from None
    if not isinstance(values, dict):
        raise SettingsError(f"'{config_path}' is no JSON object; it must begin with {{.")
    return text, values


def _check(values: Mapping[str, Any], known: Mapping[str, Any], locate: Callable[[str], str]) -> dict[str, Any]:
    """The values that mean something here, each checked."""
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UnknownSetting(f"there is no setting {key!r}{locate(key)}.{did_you_mean(key, known)}")
        check = known[key]
        if isinstance(check, dict) and isinstance(value, dict):
            checked[key] = _check(value, check, locate)
            continue
        try:
            if isinstance(check, dict):
                raise SettingsError("it must be an object with the settings of that task")
            if value is not None and check is not None:
                checked |= check(key, value)
        except UnknownSetting:
            raise
        except SettingsError as error:
            raise SettingsError(f"{key} is {json.dumps(value, default=repr)}{locate(key)}; {error}.") from None
    return checked


def _consistent(config: DumpConfig) -> DumpConfig:
    """The settings, when they go together."""
    task, level = config.task, config.level
    if len(config.scope) not in (0, 2):
        raise SettingsError(f"scope has {len(config.scope)} names; it takes two, the first and the last call.")
    if level == "L2" and config.scope:
        raise SettingsError(
            "level is 'L2' and scope is set. L2 picks the ATen calls made in the API calls that list names; "
            "leave scope out, or set level to 'L1'."
        )
    if level == "debug" and task not in ("tensor", "statistics"):
        raise SettingsError(
            f"level is 'debug' and task is {task!r}; variables are saved with task tensor or statistics."
        )
    set_here = [name for name in ("scope", "list", "parts") if getattr(config, name) != getattr(DumpConfig, name)]
    if task == "overflow_check" and set_here:
        name = set_here[0].replace("parts", "data_mode")
        raise SettingsError(f"task is 'overflow_check' and {name} is set. Every call is watched: leave {name} out.")
    if task == "free_benchmark" and level != "L1":
        raise SettingsError(
            f"task is 'free_benchmark' and level is {level!r}; API calls are checked: set level to 'L1'."
        )
    if task == "run_ut" and level not in ("L1", "mix"):
        raise SettingsError(
            f"task is 'run_ut' and level is {level!r}; API calls are checked: set level to 'L1' or 'mix'."
        )
    if task == "structure" and level not in ("L0", "mix"):
        return replace(config, level="mix")  # as the published tool does: calls by themselves have no structure
    return config


def _texts(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise SettingsError("it must be a list of names")
    return {key: tuple(value)}


def _numbers(key: str, value: Any) -> dict[str, Any]:
    try:
        return {key: parse_numbers(value, key)}
    except SettingsError as error:
        raise SettingsError(
            f'it must be a list of numbers and ranges, such as [0, "4-6"]: {error}'.rstrip(".")
        ) from None


def _switch(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise SettingsError("it must be true or false")
    return {key: value}


def _whole(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError("it must be a whole number")
    return {key: value}


def _count(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise SettingsError("it must be a whole number from 1, or -1 for no end")
    return {key: value}


def _path(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        raise SettingsError("it must be the path of a folder")
    return {key: Path(value)} if os.fspath(value) else {}  # so it stands in the file that the older tool ships


def _one_of(*allowed: str) -> Callable[[str, Any], dict[str, Any]]:
    def check(key: str, value: Any) -> dict[str, Any]:
        if value not in allowed:
            raise SettingsError(
                f"it must be one of {', '.join(allowed)}.{did_you_mean(str(value), allowed)}".rstrip(".")
            )
        return {key: value}

    return check


def _nothing_but(allowed: str) -> Callable[[str, Any], dict[str, Any]]:
    def check(key: str, value: Any) -> dict[str, Any]:
        if value != allowed:
            raise SettingsError(f"only {allowed!r} is part of this version")
        return {}

    return check


def _task(key: str, value: Any) -> dict[str, Any]:
    if value in _OTHER_TASKS:
        raise SettingsError(f"that task is not part of this version; there are {', '.join(TASKS)}")
    found = _one_of(*TASKS, *_SAME_TASK)(key, value)[key]
    return {key: _SAME_TASK.get(found, found)}


def _ascending(key: str, value: Any) -> dict[str, Any]:
    numbers = value if isinstance(value, list) else []
    if not numbers or any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
        raise SettingsError("it must be a list of numbers")
    if any(not low < high for low, high in pairwise(numbers)):
        raise SettingsError("the numbers must ascend")
    return {key: tuple(numbers)}


def _data_mode(key: str, value: Any) -> dict[str, Any]:
    """What is dumped: each of the modes adds its part, as in the published tool."""
    modes = _texts(key, value)[key]
    for mode in modes:
        _one_of(*_DATA_MODES)(key, mode)
    if "all" in modes and len(modes) > 1:
        raise SettingsError("'all' is everything already; leave the others out")
    if not modes or "all" in modes:
        return {}
    return {"parts": tuple(part for part in MSPROBE_PARTS if not set(part.split(".")).isdisjoint(modes))}


def _without_effect(key: str, value: Any) -> dict[str, Any]:
    return {}


def _refused(key: str, value: Any) -> dict[str, Any]:
    """For what the published tool has and this does not: only what switches it off is taken."""
    if value in (False, "", -1) or value == [] or value == {}:
        return {}
    raise SettingsError("that is not part of this version; leave it out")


_CALLS: dict[str, Any] = {
    "scope": _texts,
    "list": _texts,
    "data_mode": _data_mode,
    "slice": _refused,
    "request_id": _refused,
}
_ONLINE = ("online_run_ut", "online_run_ut_recompute", "nfs_path", "host", "port", "rank_list", "tls_path")
_CHECKS: dict[str, Any] = {"white_list": _texts, "black_list": _texts, "error_data_path": _path, "scope": _texts}
_FIELDS: dict[str, Any] = {
    "task": _task,
    "dump_path": _path,
    "level": _one_of(*LEVELS),
    "rank": _numbers,
    "step": _numbers,
    "enable_dataloader": _switch,
    "seed": _whole,
    "is_deterministic": _switch,
    "extra_info": _switch,
    "support_wrap_ops": _path,
    "async_dump": _without_effect,
    "precision": _one_of("low", "high"),
    "risk_level": _one_of(*RISK_LEVELS),
    "custom_op_namespaces": _without_effect,
    "dump_enable": lambda key, value: {} if value is True else _refused(key, value or "no"),
    "load": _refused,
    "acl_config": _refused,
}
_SECTIONS: dict[str, Any] = {
    "statistics": {**_CALLS, "summary_mode": _one_of("statistics", "md5"), "tensor_list": _texts},
    "tensor": {
        **_CALLS,
        "summary_mode": _one_of("statistics", "md5"),
        "file_format": _one_of("pt", "npy"),
        "bench_path": _refused,
        "backward_input": _refused,
        **dict.fromkeys(_ONLINE, _refused),
    },
    "structure": _CALLS,
    "run_ut": {**_CHECKS, "list": _texts, "data_mode": _data_mode},
    "acc_check": {**_CHECKS, "list": _texts, "data_mode": _data_mode},
    "overflow_check": {**_CALLS, "overflow_nums": _count, "check_mode": _without_effect},
    "grad_probe": {"grad_level": _one_of("L0", "L1", "L2"), "param_list": _texts, "bounds": _ascending},
    "free_benchmark": {
        "scope": _texts,
        "list": _texts,
        "pert_mode": _one_of(*PERTURBATIONS),
        "handler_type": _nothing_but("check"),
        "fuzz_stage": _one_of("forward", "backward"),
        "fuzz_level": _nothing_but("L1"),
        "fuzz_device": _without_effect,  # pert_mode says it
        "if_preheat": _refused,
        "preheat_step": _without_effect,
        "max_sample": _without_effect,
    },
    **dict.fromkeys(_OTHER_TASKS),
}
"""Section of a task → its fields; None for one that is not looked into."""


def make_target(config: DumpConfig, folder: Path, *, continued: bool = False) -> MsprobeTarget:
    """What whoever writes is told of the layout."""
    keeps_values = config.task == "tensor" or (config.task == "statistics" and config.tensor_list)
    return MsprobeTarget(
        str(folder),
        task=config.task,
        level=config.level,
        values=config.file_format if keeps_values else None,  # type: ignore[arg-type]  # checked by read_config
        values_of=config.tensor_list if config.task == "statistics" else (),
        digests=config.summary_mode == "md5",
        rounded=config.precision == "low",
        parents=config.level != "L1",
        parts=config.parts,
        continued=continued,
        index="debug.json" if config.level == "debug" else "dump.json",
    )

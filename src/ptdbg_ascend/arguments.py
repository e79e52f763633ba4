"""The arguments of `compare` and `compare_distributed`, checked before anything is read: what is wrong, and what to write instead."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.report.inspect import plain

STACK_PREFIX = "api_stack_"
"""How the files of the mode api_stack begin."""
LOG_KEY = "is_print_compare_log"
_PATHS = ("npu_pkl_path", "bench_pkl_path")
_FOLDERS = ("npu_dump_data_dir", "bench_dump_data_dir")
_KEYS = (*_PATHS, *_FOLDERS, LOG_KEY)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How results are wanted: what both functions take."""

    output: Path
    shape_flag: bool
    stack_mode: bool
    auto_analyze: bool
    suffix: str
    fuzzy_match: bool
    print_log: bool

    def __post_init__(self) -> None:
        for name in ("shape_flag", "stack_mode", "auto_analyze", "fuzzy_match"):
            _demand_bool(name, getattr(self, name))
        _demand_bool(LOG_KEY, self.print_log)
        if not isinstance(self.suffix, str) or not self.suffix.isprintable() or {*self.suffix} & {*"/\\"}:
            raise SettingsError(f"suffix is {self.suffix!r}; it becomes part of a file name: a text without slashes.")


def read_parameters(given: Any) -> dict[str, Any]:
    """The dict that `compare` is given; paths in it are Paths."""
    if not isinstance(given, Mapping):
        raise SettingsError(f"the first argument is {type(given).__name__}; it must be a dict with {', '.join(_KEYS)}.")
    for key in given:
        if key not in _KEYS:
            raise UnknownSetting(
                f"there is no parameter {key!r}.{did_you_mean(str(key), _KEYS)}\n  There are {', '.join(_KEYS)}."
            )
    held = {key: value for key, value in given.items() if value is not None}
    if lacking := [key for key in _PATHS if key not in held]:
        are = "is" if len(lacking) == 1 else "are"
        raise SettingsError(f"{' and '.join(lacking)} {are} not given: the pkl of each dump is needed.")
    for key in (*_PATHS, *_FOLDERS):
        if key in held:
            held[key] = demand_path(key, held[key])
    for key in _FOLDERS:
        if key in held and not held[key].is_dir():
            raise SettingsError(
                f"{key} '{plain(held[key])}' is no folder. It is the one with the .npy files of the dump; "
                "without the key, the folder beside the pkl is taken."
            )
    return held


def demand_path(name: str, given: Any) -> Path:
    """The path."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise SettingsError(f"{name} is {given!r}; it must be a path.")
    return Path(given)


def demand_output(given: Any) -> Path:
    """The folder for results, which must be there."""
    folder = demand_path("output_path", given)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SettingsError(f"output_path '{plain(folder)}' is a file; results go into a folder.")
    raise SettingsError(
        f"output_path '{plain(folder)}' does not exist. Make it:   mkdir -p {shlex.quote(plain(folder))}"
    )


def check_stack_mode(pairs: Iterable[tuple[Path, Path]], stack_mode: bool) -> None:
    """SettingsError when the names of the pkl files, NPU and bench, do not fit the mode; other runs say nothing of it."""
    for pair in (tuple(map(_only_pkl, pair)) for pair in pairs):
        if any(path.suffix != ".pkl" for path in pair):
            continue
        npu_has, bench_has = (path.name.startswith(STACK_PREFIX) for path in pair)
        names = f"NPU '{plain(pair[0])}', bench '{plain(pair[1])}'"
        if npu_has != bench_has:
            raise SettingsError(
                "The dump mode of the two files is not same, please check the dump files.\n"
                f"  {names}: one was dumped in the mode api_stack, the other was not. Dump both in one mode."
            )
        if npu_has and not stack_mode:
            raise SettingsError(
                "The current file contains stack information, please turn on the stack_mode.\n"
                f"  {names}. Pass stack_mode=True."
            )
        if stack_mode and not npu_has:
            raise SettingsError(
                "The current file does not contain stack information, please turn off the stack_mode.\n"
                f"  {names}: files of the mode api_stack start with {STACK_PREFIX}. Leave stack_mode out."
            )


def _only_pkl(path: Path) -> Path:
    """The one pkl in the folder of a rank, or in that of the only rank; else the path itself."""
    found = [*path.glob("*.pkl")] or [*path.glob("rank*/*.pkl")]
    return found[0] if len(found) == 1 else path


def _demand_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; it must be True or False.")

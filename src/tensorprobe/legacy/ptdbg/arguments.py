"""The arguments of `compare` and `compare_distributed`, checked before anything is read: what is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.compared.arguments import LOG_KEY, demand_path, known_parameters
from tensorprobe.text import plain

STACK_PREFIX = "api_stack_"
"""How the files of the mode api_stack begin."""
_PATHS = ("npu_pkl_path", "bench_pkl_path")
_FOLDERS = ("npu_dump_data_dir", "bench_dump_data_dir")
_KEYS = (*_PATHS, *_FOLDERS, LOG_KEY)


def read_parameters(given: Any) -> dict[str, Any]:
    """The dict that `compare` is given; paths in it are Paths."""
    held = known_parameters(given, _KEYS)
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

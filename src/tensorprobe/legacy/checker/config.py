"""`msCheckerConfig`: the settings of the package, one set for the process.

Importing this imports no torch and changes nothing in the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean


@dataclass
class CheckerConfig:
    """Changed by `update_config` alone, which checks everything before it changes anything."""

    dump_path: str = "./"
    real_data: bool = False
    enable_dataloader: bool = True
    target_iter: int | list[int] = 1
    error_data_path: str = "./"
    white_list: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dump_path = str(Path(self.dump_path).absolute())  # where the program was started, wherever it goes later

    def update_config(self, **given: Any) -> None:
        """Set what is given.

        dump_path: an existing folder. real_data: also record values. enable_dataloader: record iteration
        target_iter, as a DataLoader's batches tell them, and end the program after it; it may be a list of iterations.
        error_data_path: where run_ut, when it is run in this process, makes `ut_error_data`. white_list: names of APIs,
        such as `["conv2d"]`; only these are recorded.
        """
        known = [each.name for each in fields(self)]
        for key in given:
            if key not in known:
                raise UnknownSetting(
                    f"update_config has no parameter {key!r}.{did_you_mean(key, known)}\n  There are {', '.join(known)}."
                )
        checked = {key: _CHECKS[key](key, value) for key, value in given.items()}
        for key, value in checked.items():
            setattr(self, key, value)

    @property
    def iterations(self) -> list[int]:
        """Return the iterations that are recorded, in order."""
        return [self.target_iter] if isinstance(self.target_iter, int) else sorted(set(self.target_iter))


def _folder(key: str, value: Any) -> str:
    path = Path(_path(key, value))
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise SettingsError(f"{key} is '{value}', which {what}. It must be a folder that exists: mkdir -p '{value}'")
    return str(path)


def _path(key: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise SettingsError(f"{key} is {value!r}; it must be the path of a folder.")
    return str(Path(value).absolute())


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{key} is {value!r}; it must be True or False.")
    return value


def _iterations(key: str, value: Any) -> int | list[int]:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        raise SettingsError(f"{key} is {value!r}; it must be the number of an iteration, from 0, or a list of them.")
    return list(numbers) if isinstance(value, list) else numbers[0]


def _names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise SettingsError(f"{key} is {value!r}; it must be a list of names of APIs, such as ['conv2d'].")
    return list(value)


_CHECKS = {
    "dump_path": _folder,
    "real_data": _switch,
    "enable_dataloader": _switch,
    "target_iter": _iterations,
    "error_data_path": _path,
    "white_list": _names,
}

msCheckerConfig = CheckerConfig()

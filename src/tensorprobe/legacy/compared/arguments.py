"""Arguments of the older tools' compare functions, checked before anything is read: what is wrong, and what to write instead."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.report.xlsx import load_xlsxwriter
from tensorprobe.text import plain

LOG_KEY = "is_print_compare_log"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How results are wanted: what the compare functions take besides the dumps."""

    output: Path
    stack_mode: bool
    auto_analyze: bool
    fuzzy_match: bool
    print_log: bool
    suffix: str = ""
    xlsx: bool = False

    def __post_init__(self) -> None:
        for name in ("stack_mode", "auto_analyze", "fuzzy_match", "xlsx"):
            demand_bool(name, getattr(self, name))
        demand_bool(LOG_KEY, self.print_log)
        if not isinstance(self.suffix, str) or not self.suffix.isprintable() or {*self.suffix} & {*"/\\"}:
            raise SettingsError(f"suffix is {self.suffix!r}; it becomes part of a file name: a text without slashes.")
        if self.xlsx:
            load_xlsxwriter()  # not only after an hour of comparing


def known_parameters(given: Any, known: Sequence[str]) -> dict[str, Any]:
    """The dict that a compare function is given, without what is None; an unknown key is an error."""
    if not isinstance(given, Mapping):
        raise SettingsError(f"the first argument is {type(given).__name__}; it must be a dict with {', '.join(known)}.")
    for key in given:
        if key not in known:
            raise UnknownSetting(
                f"there is no parameter {key!r}.{did_you_mean(str(key), known)}\n  There are {', '.join(known)}."
            )
    return {key: value for key, value in given.items() if value is not None}


def demand_path(name: str, given: Any) -> Path:
    """The path."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise SettingsError(f"{name} is {given!r}; it must be a path.")
    return Path(given)


def demand_folder(name: str, given: Any) -> Path:
    """The folder with the dumps of the ranks."""
    folder = demand_path(name, given)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise SettingsError(f"{name} '{plain(folder)}' {what}; it must be the folder with rank0, rank1, …")
    return folder


def demand_output(given: Any, *, create: bool = False) -> Path:
    """The folder for results. It must be there, unless it is to be made."""
    folder = demand_path("output_path", given)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SettingsError(f"output_path '{plain(folder)}' is a file; results go into a folder.")
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"output_path '{plain(folder)}' cannot be made: {error.strerror}.") from None
        return folder
    raise SettingsError(
        f"output_path '{plain(folder)}' does not exist. Make it:   mkdir -p {shlex.quote(plain(folder))}"
    )


def demand_bool(name: str, value: Any) -> None:
    """SettingsError unless it is True or False."""
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; it must be True or False.")

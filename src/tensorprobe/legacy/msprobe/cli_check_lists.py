"""`white_list` and `black_list` of a config.json: which APIs a check is for.

In: the file, and a run. Out: globs for the calls, or None for all. An API is named as in the dump, with its group or
without: `conv2d`, `Functional.conv2d`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tensorprobe.errors import NotFound, SettingsError, nearest
from tensorprobe.record import Run
from tensorprobe.text import plain


class CheckLists(msgspec.Struct, frozen=True):
    """The part of a config.json that a check reads."""

    white_list: list[str] = []
    black_list: list[str] = []
    error_data_path: str | None = None


class _Config(msgspec.Struct, frozen=True):
    run_ut: CheckLists = CheckLists()
    acc_check: CheckLists | None = None


def read_lists(path: Path) -> CheckLists:
    """The lists; the newer spelling of the section is `acc_check`."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        raise SettingsError(f"'{plain(path)}' cannot be read: {error.strerror}.") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise SettingsError(f"'{plain(path)}' is no config.json: {error}.") from None
    lists = config.acc_check or config.run_ut
    if lists.white_list and lists.black_list:
        raise SettingsError(f"'{plain(path)}' has both a white_list and a black_list: one of them must be empty.")
    return lists


def chosen_calls(run: Run, lists: CheckLists) -> list[str] | None:
    """A glob for each op that is to be checked; None when nothing was chosen. NotFound for a name that the dump does not have."""
    asked = lists.white_list or lists.black_list
    if not asked:
        return None
    ops = {
        entry.name.rsplit(".", 2)[0]
        for place in run.segments()
        for entry in run.segment(*place).index().entries
        if entry.name.endswith(".forward")
    }
    known = {op: {op, op.partition(".")[2]} for op in ops}
    for name in asked:
        if not any(name in spellings for spellings in known.values()):
            close = nearest(name, {spelling for spellings in known.values() for spelling in spellings})
            raise NotFound(f"no API {name!r} in '{plain(run.path)}'. Nearest: {', '.join(close) or 'none'}")
    listed = {op for op, spellings in known.items() if spellings & {*asked}}
    return sorted(f"{op}.*" for op in (listed if lists.white_list else ops - listed))

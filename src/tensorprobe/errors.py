"""Every error a user can cause, as one tree.

    TensorprobeError
    ├── SettingsError            a setting, flag or argument is wrong
    │   ├── UnknownSetting       a key nobody knows, with the nearest known one
    │   └── DeviceUnavailable    torch cannot use the device here
    ├── RunError                 something about a run on disk
    │   ├── RunNotFound          no run in that folder
    │   ├── RunExists            capture into a folder that already holds one
    │   ├── CannotWrite          the folder for a run cannot be made or written to
    │   ├── RunDamaged           a file of the run breaks the format
    │   │   └── TensorDamaged    the bytes of one tensor are not there or not sound
    │   └── UnsupportedVersion   written by a newer format
    ├── FileRefused              a file that is not read: no regular file, or too large
    ├── NotFound                 a call, slot, step or rank that the run does not hold
    ├── NoData                   the slot was recorded without its values
    ├── CannotCompare            two runs that have nothing to compare
    │   ├── NothingPaired        not one call has a partner
    │   └── OtherLayout          they ran in other numbers of processes, and differ only for that, as far as is known
    ├── TrainingStopped          a watch was told to end the training after so many findings, and does
    ├── UnsupportedTorch         a private torch name that a room needs is absent
    ├── SelfTestFailed           capture does not record what it must, in this process
    └── CommandFailed            a command started for the user could not be captured

A message states a fact, where, the evidence and the next step. A difference between runs is a result, never an error.
Two warnings: `CaptureIncomplete` (training went on, and what is missing is counted) and `UntriedTorch` (a newer torch).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice


class TensorprobeError(Exception):
    """Base of every error that a user's input can cause."""


class SettingsError(TensorprobeError, ValueError):
    """A setting, flag or argument is wrong."""


class UnknownSetting(SettingsError, TypeError):
    """A setting that does not exist. Also a TypeError, as for any function that gets a keyword it does not take."""


class DeviceUnavailable(SettingsError):
    """torch cannot use the device in this process, or in one that it starts."""


class RunError(TensorprobeError):
    """Something about a run on disk."""


class RunNotFound(RunError, FileNotFoundError):
    """There is no run in that folder."""


class RunExists(RunError, FileExistsError):
    """The folder already holds a run, or files that are not ours."""


class CannotWrite(RunError, OSError):
    """The folder for a run cannot be made or written to."""


class RunDamaged(RunError):
    """A file of the run breaks the format."""


class TensorDamaged(RunDamaged):
    """The bytes of one tensor are missing or not sound."""


class UnsupportedVersion(RunError):
    """The run was written in a format this version does not read."""


class FileRefused(TensorprobeError):
    """The file is not read: it is no regular file, or it is too large."""


class NotFound(TensorprobeError, LookupError):
    """The run does not hold the call, slot, step or rank asked for."""


class NoData(TensorprobeError):
    """The slot was recorded without its values."""


class CannotCompare(TensorprobeError):
    """The two runs have nothing to compare."""


class TrainingStopped(TensorprobeError):
    """A watch was told to end the training after so many findings, and does."""


class NothingPaired(CannotCompare):
    """Not one call of one run has a partner in the other."""


class OtherLayout(CannotCompare):
    """Two runs with other numbers of processes, which hold other parts of the tensors."""


class SelfTestFailed(TensorprobeError):
    """A few calls with known values were recorded before the program began, and were not all in the record."""


class UnsupportedTorch(TensorprobeError, ImportError):
    """A private name of torch that this room needs is absent."""


class CommandFailed(TensorprobeError):
    """A command that was started for the user could not be captured."""


class CaptureIncomplete(UserWarning):
    """Something could not be recorded; training went on."""


class UntriedTorch(UserWarning):
    """The installed torch is newer than those that this version of tensorprobe was tried with."""


_LONGEST, _MOST_KNOWN = 200, 2000


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names closest to `name`, best first; empty when none is close.

    Names of more than 200 characters, and names beyond the first 2,000, are not looked at: the time grows with the square.
    """
    if len(name) > _LONGEST:
        return []
    short = islice((each for each in known if len(each) <= _LONGEST), _MOST_KNOWN)
    return difflib.get_close_matches(name, list(short), n=count, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known name, or nothing."""
    close = nearest(name, known, count=1)
    return f" Did you mean {close[0]!r}?" if close else ""

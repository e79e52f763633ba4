"""The one mechanism for settings: default, help, validation and documentation of a setting are declared in one place.

A room declares a table, a frozen dataclass whose fields are made by `setting`:

    @dataclass(frozen=True, kw_only=True)
    class CompareSettings(Settings):
        jobs: int = setting(1, "Number of processes; each compares whole ranks.", whole(1))

Values are checked when a table is made: SettingsError for a value that makes no sense, before anything is read or started.
`Table.of(**given)` also checks the names: UnknownSetting for a key that does not exist, with the nearest one that does.
The command line takes defaults and help from the same fields, and docs/cli.md is generated from them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean

Numbers = str | int | Iterable[int]
"""Steps or ranks as a user gives them: 3, [0, 2] or '0,2-4'."""
Names = str | Iterable[str]
"""One name, or several."""
Check = Callable[[Any, str], Any]
"""Takes a value and the name of its setting; returns the value to use, or raises SettingsError."""
T = TypeVar("T", bound="Settings")
P = ParamSpec("P")
R = TypeVar("R")


class Declared(NamedTuple):
    """What a table says about one setting."""

    default: Any
    help: str
    check: Check | None


def setting(default: Any, help: str, check: Check | None = None) -> Any:
    """Declare a field of a table. None is not checked where it is the default."""
    return dataclasses.field(default=default, metadata={"help": help, "check": check})


class Settings:
    """Base of every table of settings."""

    def __post_init__(self) -> None:
        for name, declared in self.declared().items():
            value = getattr(self, name)
            if declared.check is not None and not (value is None and declared.default is None):
                object.__setattr__(self, name, declared.check(value, name))
        self.check_together()

    def check_together(self) -> None:
        """Raise SettingsError for values that are right alone and wrong together."""

    @classmethod
    def declared(cls) -> dict[str, Declared]:
        """Return every setting of this table by its name, in the order of declaration."""
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every table is a dataclass
        return {field.name: Declared(field.default, **field.metadata) for field in fields}

    @classmethod
    def of(cls: type[T], /, **given: Any) -> T:
        """Return the table with these values. UnknownSetting for a key that is not in it."""
        demand_known(given, cls.declared())
        return cls(**given)

    @classmethod
    def among(cls: type[T], arguments: Mapping[str, Any]) -> T:
        """Return the table with its values from the arguments of a function, which may have others besides."""
        return cls(**{name: arguments[name] for name in cls.declared()})


def demand_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownSetting for the first key that is not known, with the nearest one that is."""
    names = list(known)
    for key in given:
        if key not in names:
            raise UnknownSetting(f"unknown setting {key!r}.{did_you_mean(key, names)}")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise UnknownSetting, and not TypeError, for a keyword that it does not take."""
    signature = inspect.signature(function)
    known = signature.parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        demand_known(kwargs, known)
        return function(*args, **kwargs)

    shown = [each.replace(annotation=_Shown(each.annotation)) for each in known.values()]
    checked.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=shown, return_annotation=_Shown(signature.return_annotation)
    )
    return checked


class _Shown(str):
    """An annotation that `help` shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def flag(given: Any, key: str) -> bool:
    """Check a True or False."""
    if not isinstance(given, bool):
        raise SettingsError(f"{key} is {given!r}; expected True or False.")
    return given


_MOST = 1 << 62
"""No setting is greater: other processes and the system take 64 bits."""
_MOST_NUMBERS = 10_000_000


def whole(least: int, most: int | None = None, *, note: str = "") -> Check:
    """Make a check for a whole number in a range."""

    def check(given: Any, key: str) -> int:
        if (
            not isinstance(given, int)
            or isinstance(given, bool)
            or given < least
            or given > (_MOST if most is None else most)
        ):
            span = f"{least} or more" if most is None else f"from {least:,} to {most:,}"
            raise SettingsError(f"{key} is {given!r}; expected a whole number, {span}{note}.")
        return given

    return check


def above(limit: float, *, most: float = sys.float_info.max, note: str = "") -> Check:
    """Make a check for a finite number greater than a limit."""

    def check(given: Any, key: str) -> float:
        if not isinstance(given, (int, float)) or isinstance(given, bool) or not limit < given <= most:
            raise SettingsError(f"{key} is {given!r}; expected a number greater than {limit:g}{note}.")
        return given

    return check


def one_of(*allowed: str) -> Check:
    """Make a check for one of a few words."""

    def check(given: Any, key: str) -> str:
        if given not in allowed:
            hint = did_you_mean(str(given), allowed)
            raise SettingsError(f"{key} is {given!r}; expected {_listed(allowed)}.{hint}")
        return str(given)

    return check


def some_of(*allowed: str) -> Check:
    """Make a check for one or more of a few words."""

    def check(given: Any, key: str) -> tuple[str, ...]:
        chosen = name_list(given, key)
        for entry in chosen:
            if entry not in allowed:
                hint = did_you_mean(entry, allowed)
                raise SettingsError(f"{key} has {entry!r}; expected {_listed(allowed)}, or several of them.{hint}")
        if not chosen:
            raise SettingsError(f"{key} is empty, so nothing would be recorded. Leave it out to record all.")
        return chosen

    return check


def name_list(given: Any, key: str) -> tuple[str, ...]:
    """Check one name or several."""
    entries = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise SettingsError(f"{key} is {given!r}; expected a name or a list of names.")
    return entries


def two_names(given: Any, key: str) -> tuple[str, ...]:
    """Check the first and the last call of a span."""
    ends = name_list(given, key)
    if len(ends) != 2:
        raise SettingsError(
            f"{key} has {len(ends)} name{'s' if len(ends) != 1 else ''}; expected two, the first and the last call."
        )
    return ends


def parse_numbers(given: Any, key: str) -> tuple[int, ...]:
    """Return `3`, `[0, 2]`, `"0,2-4"` or `["0", "2-4"]` as sorted, distinct numbers."""
    parts: Iterable[Any] = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else given
    numbers: set[int] = set()
    try:
        for part in parts:
            match = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", str(part))
            if match is None:
                raise SettingsError(f"{key}: {part!r} is not a number or a range such as 2-4.")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first or last - first + len(numbers) > _MOST_NUMBERS:
                raise SettingsError(f"{key}: the range {part!r} is empty or too long.")
            numbers.update(range(first, last + 1))
    except TypeError:
        raise SettingsError(f"{key} is {given!r}; expected numbers such as [0, 2] or '0,2-4'.") from None
    return tuple(sorted(numbers))


def parse_bytes(given: Any, key: str) -> int:
    """Return `1048576`, `"512M"` or `"2 GB"` as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]{1,19}(?:\.[0-9]{1,18})?)\s*([KMGT]?)i?B?\s*", str(given), re.IGNORECASE)
    wanted = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ") if match else _MOST + 1
    if wanted > _MOST:
        raise SettingsError(f"{key}: {given!r} is not a size such as 512M or 2G.")
    return int(wanted)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

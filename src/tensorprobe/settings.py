"""Every setting of a capture in one table: name, default, what it means. Validation, help texts and docs read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.model import CaptureLevel

Mode = Literal["summary", "tensor", "structure"]

LEVELS: tuple[str, ...] = tuple(map(str, CaptureLevel))
MODES: tuple[str, ...] = get_args(Mode)
DIRECTIONS = ("forward", "backward")
SIDES = ("input", "output")


class CaptureSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a probe records. Build it with `capture_settings`, which checks every value."""

    level: CaptureLevel = CaptureLevel.API
    mode: str = "tensor"
    steps: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    directions: tuple[str, ...] = DIRECTIONS
    sides: tuple[str, ...] = SIDES
    names: tuple[str, ...] = ()
    span: tuple[str, str] | None = None
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    floating_only: bool = False
    max_bytes: int | None = None
    stacks: bool | None = None
    ring_bytes: int = 128 << 20
    in_process: bool = False

    @property
    def wants_stacks(self) -> bool:
        """Stacks are on unless asked otherwise, but not in summary mode, where they would cost more than the rest."""
        return self.mode != "summary" if self.stacks is None else self.stacks


SETTINGS_HELP: dict[str, str] = {
    "level": "what counts as a call: module, api, aten, or mix (modules and APIs, each with its parent)",
    "mode": "how much of each tensor: summary (statistics and digest), tensor (also the values), structure (names and shapes)",
    "steps": "only these steps, as in [0, 2] or '0,2-4'; all when not given",
    "ranks": "only these ranks; all when not given",
    "directions": "forward, backward or both",
    "sides": "input, output or both",
    "names": "only calls with these names: Functional.conv2d.1 for both directions, Functional.conv2d.1.forward for one",
    "span": "only the calls from the first name to the second, both included",
    "ops": "only ops whose name has this in it, or matches it as a glob",
    "modules": "only calls made in modules whose path has this in it, or matches it as a glob",
    "inside": "only ATen calls made inside these API calls, named as for names; needs level aten",
    "floating_only": "values and statistics of floating and complex tensors only",
    "max_bytes": "at most this many bytes of values in all, over all ranks; summaries only after that",
    "stacks": "the user's stack of each call; by default on, but off in summary mode",
    "ring_bytes": "memory for tensors on their way to the disk; training waits when it is full",
    "in_process": "record from a thread of the training process instead of a process of its own",
}


def demand_known(given: Iterable[str], known: Iterable[str]) -> None:
    """UnknownSetting for the first key that nobody knows, with the nearest that somebody does."""
    names = list(known)
    for key in given:
        if key not in names:
            raise UnknownSetting(f"there is no setting {key!r}.{did_you_mean(key, names)}")


def capture_settings(**given: Any) -> CaptureSettings:
    """Checked settings. UnknownSetting for a key that does not exist, SettingsError for a value that makes no sense."""
    demand_known(given, SETTINGS_HELP)
    values = dict(given)
    _check_choice(values, "level", LEVELS)
    _check_choice(values, "mode", MODES)
    for key in ("steps", "ranks"):
        if values.get(key) is not None:
            values[key] = parse_numbers(values[key], key)
    for key, allowed in (("directions", DIRECTIONS), ("sides", SIDES)):
        if key in values:
            values[key] = _choices(values[key], key, allowed)
    for key in ("names", "ops", "modules", "inside"):
        if key in values:
            values[key] = _texts(values[key], key)
    if values.get("span") is not None:
        values["span"] = _texts(values["span"], "span")
        if len(values["span"]) != 2:
            raise SettingsError(f"span takes two names, the first and the last call; got {len(values['span'])}.")
    if values.get("inside") and not CaptureLevel(values.get("level", CaptureLevel.API)).has_aten:
        raise SettingsError(
            f"inside picks ATen calls by the API call they are made in; level is {values.get('level', 'api')!r}. "
            "Set level='aten', or pick the API calls themselves with names."
        )
    for key in ("max_bytes", "ring_bytes"):
        if values.get(key) is not None:
            values[key] = parse_bytes(values[key], key)
    if values.get("ring_bytes", 1 << 20) < 1 << 20:
        raise SettingsError(f"ring_bytes is {values['ring_bytes']:,}; it must be at least 1 MiB (1048576).")
    try:
        return msgspec.convert(values, CaptureSettings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{error}".replace("$.", "")) from None


def parse_numbers(given: Any, key: str) -> tuple[int, ...]:
    """`3`, `[0, 2]`, `"0,2-4"` or `["0", "2-4"]` as sorted, distinct numbers."""
    parts: Iterable[Any] = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else given
    numbers: set[int] = set()
    try:
        for part in parts:
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(part))
            if match is None:
                raise SettingsError(f"{key}: {part!r} is not a number or a range such as 2-4.")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first or last - first > 10_000_000:
                raise SettingsError(f"{key}: the range {part!r} is empty or far too long.")
            numbers.update(range(first, last + 1))
    except TypeError:
        raise SettingsError(f"{key} takes numbers such as [0, 2] or '0,2-4'; got {given!r}.") from None
    return tuple(sorted(numbers))


def parse_bytes(given: Any, key: str) -> int:
    """`1048576`, `"512M"` or `"2 GB"` as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", str(given), re.IGNORECASE)
    if match is None:
        raise SettingsError(f"{key}: {given!r} is not a size such as 512M or 2G.")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _check_choice(values: dict[str, Any], key: str, allowed: Sequence[str]) -> None:
    if key in values and values[key] not in allowed:
        hint = did_you_mean(str(values[key]), allowed)
        raise SettingsError(f"{key} is {values[key]!r}; it must be one of {', '.join(allowed)}.{hint}")


def _choices(given: Any, key: str, allowed: Sequence[str]) -> tuple[str, ...]:
    chosen = _texts(given, key)
    for entry in chosen:
        if entry not in allowed:
            raise SettingsError(
                f"{key} has {entry!r}; it may hold {' and '.join(allowed)}.{did_you_mean(entry, allowed)}"
            )
    if not chosen:
        raise SettingsError(f"{key} is empty: nothing would be recorded. Leave it out for both.")
    return chosen


def _texts(given: Any, key: str) -> tuple[str, ...]:
    entries = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise SettingsError(f"{key} takes names; got {given!r}.")
    return entries

"""The dict that `compare` is given, or the file that holds it, checked before anything is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.compared.arguments import LOG_KEY, demand_path, known_parameters
from tensorprobe.text import plain

_SPELLINGS = {
    "npu": ("npu_json_path", "npu_path"),
    "bench": ("bench_json_path", "bench_path"),
    "stack": ("stack_json_path", "stack_path"),
}
KEYS = (*(key for keys in _SPELLINGS.values() for key in keys), LOG_KEY)
_TURN_ON = "The current file contains stack information, please turn on the stack_mode."
_TURN_OFF = "The current file does not contain stack information, please turn off the stack_mode."


@dataclass(frozen=True)
class Parameters:
    """Where the dumps are. `stack` is the stack.json that was given; None: the one beside the NPU's dump."""

    npu: Path
    bench: Path
    stack: Path | None
    print_log: Any


def read_parameters(given: Any) -> Parameters:
    """The parameters; SettingsError names the key that is wrong, missing, or there twice."""
    held = known_parameters(given, KEYS)
    paths: dict[str, Path | None] = {}
    for side, keys in _SPELLINGS.items():
        named = [key for key in keys if key in held]
        if len(named) > 1 and held[named[0]] != held[named[1]]:
            raise SettingsError(f"{' and '.join(named)} mean the same and are not equal: leave out one of them.")
        if not named and side != "stack":
            raise SettingsError(f"{' or '.join(keys)} is not given: the dump.json of each side is needed.")
        paths[side] = demand_path(named[0], held[named[0]]) if named else None
    npu, bench, stack = paths["npu"], paths["bench"], paths["stack"]
    assert npu is not None and bench is not None
    if stack is not None and not stack.is_file():
        what = "is a folder" if stack.is_dir() else "does not exist"
        raise SettingsError(f"stack_json_path '{plain(stack)}' {what}; it is the stack.json of the NPU's dump.")
    return Parameters(npu, bench, stack, held.get(LOG_KEY, False))


def read_file(path: Path) -> dict[str, Any]:
    """What a compare.json says, unknown keys named with their line."""
    try:
        text = path.read_text(encoding="utf-8")
        given = json.loads(text)
    except OSError as error:
        raise SettingsError(f"'{plain(path)}' cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"'{plain(path)}' is no JSON: {error}.") from None
    try:
        return known_parameters(given, KEYS)
    except SettingsError as error:
        unknown = [key for key in given if key not in KEYS] if isinstance(given, dict) else []
        lines = [str(text[: text.find(json.dumps(key))].count("\n") + 1) for key in unknown[:1]]
        raise type(error)(f"in '{plain(path)}'{''.join(f', line {line}' for line in lines)}: {error}") from None


def check_stack_mode(given: Parameters, stack_mode: bool) -> None:
    """SettingsError when a stack.json is given and not to be shown, or to be shown and not there."""
    if given.stack is not None:
        if stack_mode is False:
            raise SettingsError(
                f"{_TURN_ON}\n  '{plain(given.stack)}' is given. Pass stack_mode=True (-s), or leave it out."
            )
        return
    dump = given.npu / "dump.json" if given.npu.is_dir() else given.npu
    if stack_mode is True and dump.name == "dump.json" and dump.is_file() and not stack_beside(dump):
        raise SettingsError(
            f"{_TURN_OFF}\n  There is no stack.json beside '{plain(dump)}'. Leave stack_mode out, or pass stack_json_path."
        )


def stack_beside(dump: Path) -> bool:
    """Whether a dump.json has its stacks beside it."""
    return dump.with_name("stack.json").is_file()

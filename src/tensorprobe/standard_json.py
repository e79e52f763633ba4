"""JSON that any parser reads: NaN and the infinities are the strings "NaN", "Infinity" and "-Infinity", as in a run.

`encode` writes a struct or plain values, `decode` reads back what it wrote, and `schema` describes it: in the schema every
field is required, because `encode` always writes all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tensorprobe.errors import SettingsError

T = TypeVar("T")

_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def encode(value: object, *, indent: int | None = None) -> str:
    """Return the value as standard JSON."""
    return json.dumps(json_ready(msgspec.to_builtins(value, str_keys=True)), allow_nan=False, indent=indent)


def decode(text: str | bytes, kind: type[T], *, what: str) -> T:
    """Return the struct that `encode` wrote. SettingsError, which names `what` was expected, when it is something else."""
    try:
        return msgspec.convert(msgspec.json.decode(text), kind, strict=False)  # not strict: "NaN" is a number
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"this is not the JSON of {what}: {error}") from error


def schema(kind: type, *, title: str) -> dict[str, Any]:
    """Return the JSON schema of what `encode` writes for that struct."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **_as_written(msgspec.json.schema(kind)),
    }


def json_ready(value: Any) -> Any:
    """Return the value with non-finite numbers as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_ready(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(held) for held in value]
    return value


def _as_written(part: Any) -> Any:
    """Turn a schema of what may be read into one of what is written: all fields, non-finite numbers as strings."""
    if isinstance(part, list):
        return [_as_written(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "number":
        return {**{key: value for key, value in part.items() if key != "type"}, **_NUMBER}
    written = {key: _as_written(each) for key, each in part.items() if key != "default"}
    if "properties" in written:
        written["required"] = list(written["properties"])
    return written

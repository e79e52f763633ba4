"""A comparison as JSON that any parser reads, and the schema of it.

JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity", as in a run. The schema is shipped as
`comparison.schema.json`; it is what `comparison_schema()` gives, and every field is in it and required.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import SettingsError
from tensorprobe.model.comparison import Comparison
from tensorprobe.report.inspect import json_ready

SCHEMA_FILE = Path(__file__).with_name("comparison.schema.json")
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def comparison_json(comparison: Comparison, *, indent: int | None = None) -> str:
    """The comparison as one JSON object; the same object for `--json` and for summary.json."""
    return json.dumps(json_ready(msgspec.to_builtins(comparison, str_keys=True)), allow_nan=False, indent=indent)


def read_comparison(text: str | bytes) -> Comparison:
    """The comparison that `comparison_json` wrote. Raises SettingsError when it is none."""
    try:
        return msgspec.convert(msgspec.json.decode(text), Comparison, strict=False)  # not strict: "NaN" is a number
    except msgspec.MsgspecError as error:
        raise SettingsError(f"this is not the JSON of a comparison: {error}") from error


def comparison_schema() -> dict[str, Any]:
    """The JSON schema of what `comparison_json` gives."""
    schema = as_written(msgspec.json.schema(Comparison))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tensorprobe comparison", **schema}


def as_written(schema: Any) -> Any:
    """A schema of msgspec, turned from what may be read to what is written: all fields, non-finite numbers as strings."""
    if isinstance(schema, list):
        return [as_written(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {**{key: value for key, value in schema.items() if key != "type"}, **_NUMBER}
    written = {key: as_written(part) for key, part in schema.items() if key != "default"}
    if "properties" in written:
        written["required"] = list(written["properties"])
    return written

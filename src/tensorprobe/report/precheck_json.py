"""A precheck as JSON that any parser reads, and the schema of it.

JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity", as in a run. The schema is shipped as
`precheck.schema.json`; it is what `precheck_schema()` gives, and every field is in it and required.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import SettingsError
from tensorprobe.model.precheck import Precheck
from tensorprobe.report.compare_json import as_written
from tensorprobe.report.inspect import json_ready

SCHEMA_FILE = Path(__file__).with_name("precheck.schema.json")


def precheck_json(precheck: Precheck, *, indent: int | None = None) -> str:
    """The precheck as one JSON object; the same object for `--json` and for summary.json."""
    return json.dumps(json_ready(msgspec.to_builtins(precheck)), allow_nan=False, indent=indent)


def read_precheck(text: str | bytes) -> Precheck:
    """The precheck that `precheck_json` wrote. Raises SettingsError when it is none."""
    try:
        return msgspec.convert(msgspec.json.decode(text), Precheck, strict=False)  # not strict: "NaN" is a number
    except msgspec.MsgspecError as error:
        raise SettingsError(f"this is not the JSON of a precheck: {error}") from error


def precheck_schema() -> dict[str, Any]:
    """The JSON schema of what `precheck_json` gives."""
    schema = as_written(msgspec.json.schema(Precheck))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tensorprobe precheck", **schema}

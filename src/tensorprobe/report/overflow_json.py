"""An overflow report as JSON that any parser reads. NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", as in a run."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tensorprobe.errors import SettingsError
from tensorprobe.model.overflow import OverflowReport
from tensorprobe.report.compare_json import as_written
from tensorprobe.report.inspect import json_ready


def overflow_json(report: OverflowReport, *, indent: int | None = None) -> str:
    """The report as one JSON object; the same for `--json` and for the files of a watch."""
    return json.dumps(json_ready(msgspec.to_builtins(report, str_keys=True)), allow_nan=False, indent=indent)


def read_overflow(text: str | bytes) -> OverflowReport:
    """The report that `overflow_json` wrote. SettingsError when it is none."""
    try:
        return msgspec.convert(msgspec.json.decode(text), OverflowReport, strict=False)  # not strict: "NaN" is a number
    except msgspec.MsgspecError as error:
        raise SettingsError(f"this is not the JSON of an overflow report: {error}") from error


def overflow_schema() -> dict[str, Any]:
    """The JSON schema of what `overflow_json` gives."""
    schema = as_written(msgspec.json.schema(OverflowReport))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tensorprobe overflow", **schema}

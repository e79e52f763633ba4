"""The JSON of a precheck: standard, complete, and what the shipped schema says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tensorprobe import report
from tensorprobe.errors import SettingsError
from tensorprobe.model.precheck import CallCheck, Checked, Precheck
from tensorprobe.standard_json import decode, encode, schema
from tests.report.made import HOSTILE
from tests.report.made_precheck import check, checked, failing, precheck, skipped

SCHEMA_FILE = Path(report.__file__).with_name("precheck.schema.json")
SCHEMA = schema(Precheck, title="tensorprobe precheck")

SITUATIONS = {
    "fails": precheck(check(equal=["Functional.softmax.1.forward"]), failing(), skipped(), notes=["a note"]),
    "nothing": precheck(),
    "hostile": precheck(failing(HOSTILE, message=HOSTILE, source=None)),
    "not finite": precheck(check(details=[checked(max_rel=math.inf, measured=math.nan)])),
}


def parsed(made: Precheck) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(encode(made), parse_constant=refuse)


@pytest.mark.parametrize("made", SITUATIONS.values(), ids=SITUATIONS)
def test_the_schema_fits_and_reading_gives_back_what_was_written(made: Precheck) -> None:
    shipped = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(shipped)
    jsonschema.validate(parsed(made), shipped)
    assert encode(decode(encode(made, indent=2), Precheck, what="a precheck")) == encode(made)


def test_the_shipped_schema_is_the_one_of_the_structs() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == SCHEMA, "run: tools/make_tables.py"
    for struct in (Precheck, CallCheck, Checked):
        described = SCHEMA["$defs"][struct.__name__]
        assert list(described["properties"]) == described["required"] == list(struct.__struct_fields__)


def test_the_schema_refuses_what_is_wrong() -> None:
    for key, value in (("calls", 1.5), ("elapsed_s", "soon"), ("checks", [{}]), ("reasons", ["a"])):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**parsed(SITUATIONS["fails"]), key: value}, SCHEMA)


def test_numbers_that_json_lacks_are_strings() -> None:
    (one,) = parsed(SITUATIONS["not finite"])["checks"][0]["details"]
    assert (one["max_rel"], one["measured"]) == ("Infinity", "NaN")


def test_other_json_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"not the JSON of a precheck: .*`standard`"):
        decode(encode(precheck()).replace('"standard"', '"standart"'), Precheck, what="a precheck")

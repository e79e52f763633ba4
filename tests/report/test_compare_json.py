"""The JSON of a comparison: standard, complete, and what the shipped schema says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tensorprobe import report
from tensorprobe.errors import SettingsError
from tensorprobe.model import comparison as model
from tensorprobe.model.comparison import Comparison
from tensorprobe.standard_json import decode, encode, schema
from tests.report import made

SCHEMA_FILE = Path(report.__file__).with_name("comparison.schema.json")
SCHEMA = schema(Comparison, title="tensorprobe comparison")

SITUATIONS = {
    "diverged": made.comparison(
        findings=[made.finding()], externals=[made.external()], first_difference=made.divergence()
    ),
    "agrees": made.agreeing(),
    "structural": made.comparison(divergence=made.structural()),
    "hostile": made.hostile(),
    "not finite": made.comparison(
        divergence=made.divergence(row=made.row(max_abs=math.inf, bias=-math.inf), input_error=math.nan)
    ),
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def parsed(comparison: Comparison) -> Any:
    return json.loads(encode(comparison), parse_constant=refuse)


@pytest.mark.parametrize("comparison", SITUATIONS.values(), ids=SITUATIONS)
def test_the_schema_fits(comparison: Comparison) -> None:
    shipped = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(shipped)
    jsonschema.validate(parsed(comparison), shipped)


def test_the_schema_refuses_what_is_wrong() -> None:
    sound = parsed(made.comparison())
    for path, value in [
        (["answer"], "perhaps"),
        (["elapsed_s"], "soon"),
        (["divergence", "row", "max_abs"], "nan"),
        (["divergence", "row", "status"], "fine"),
        (["divergence", "source"], ["model.py"]),
        (["buckets", "paired"], 1.5),
    ]:
        broken = json.loads(json.dumps(sound))
        holder = broken
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)
        del holder[path[-1]]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)


def test_the_shipped_schema_is_the_one_of_the_structs() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == SCHEMA, "run: tools/make_tables.py"


def test_the_schema_has_every_field_of_every_struct() -> None:
    for name, held in vars(model).items():
        if isinstance(held, type) and issubclass(held, msgspec.Struct) and held.__module__ == model.__name__:
            described = SCHEMA["$defs"][name]
            assert list(described["properties"]) == described["required"] == list(held.__struct_fields__)


def test_numbers_that_json_lacks_are_strings() -> None:
    row = parsed(SITUATIONS["not finite"])["divergence"]["row"]
    assert (row["max_abs"], row["bias"], row["slope"], row["relative_l2"]) == ("Infinity", "-Infinity", "NaN", 0.24)


@pytest.mark.parametrize("comparison", SITUATIONS.values(), ids=SITUATIONS)
def test_reading_gives_back_what_was_written(comparison: Comparison) -> None:
    text = encode(comparison, indent=2)
    assert encode(decode(text, Comparison, what="a comparison")) == encode(comparison)


def test_other_json_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"not the JSON of a comparison: .*`divergence`"):
        decode(encode(made.comparison()).replace('"divergence"', '"divergense"'), Comparison, what="a comparison")
    with pytest.raises(SettingsError, match="not the JSON of a comparison"):
        decode("{", Comparison, what="a comparison")

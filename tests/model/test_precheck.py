"""The answer of a precheck, as it is read from a file."""

from __future__ import annotations

import json

import pytest

from tensorprobe.errors import SettingsError
from tensorprobe.model.precheck import Precheck
from tensorprobe.standard_json import decode, encode
from tests.report.made_precheck import precheck


@pytest.mark.parametrize(
    "changes", [{"skipped": 1}, {"passed": -1, "calls": -1}, {"failed": 1 << 60}, {"reasons": {"no kernel": 1}}]
)
def test_counts_that_do_not_add_up_are_refused(changes: dict[str, object]) -> None:
    written = json.loads(encode(precheck()))
    assert decode(json.dumps(written), Precheck, what="a precheck").calls == 0
    with pytest.raises(SettingsError, match="not the JSON of a precheck: its counts do not add up"):
        decode(json.dumps({**written, **changes}), Precheck, what="a precheck")

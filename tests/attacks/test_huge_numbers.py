"""JSON has no largest number: each number of a file, replaced by one that nothing can hold, gives an answer or one clear error."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tensorprobe.text import size
from tests.attacks import costs
from tests.builders import runs

X = np.ones((4, 4), np.float32)
_NUMBER = re.compile(r"(?<=[:\[ ,])-?\d+(\.\d+)?(?=[,\]}\n])")
HUGE = ("9" * 400, "-" + "9" * 400, "9" * 20, "9" * 4200, "1e400")


@pytest.mark.parametrize("file", ["step0/rank0/calls.jsonl", "manifest.json", "rank0.json"])
def test_any_number_may_be_huge(file: str, tmp_path: Path) -> None:
    call = runs.call(
        "Torch.mm.0.forward", inputs=[X, X], outputs=[X @ X], args=[{"slot": "input.0"}, {"slot": "input.1"}]
    )
    run = runs.write(tmp_path / "a", [call])
    path = run / file
    text = path.read_text()
    places = list(_NUMBER.finditer(text))
    assert places
    for place in places:
        for huge in HUGE:
            path.write_text(text[: place.start()] + huge + text[place.end() :])
            for command in (
                ("inspect", run, "Torch.mm.0.forward"),
                ("inspect", run, "--verify"),
                ("compare", run, run, "--prove", "off"),
            ):
                cost = costs.run_here(*command)
                where = text[max(0, place.start() - 40) : place.end()]
                assert not cost.problems(0, 1, 2), (where, huge[:9], command, cost.problems(0, 1, 2), cost.err[-800:])


def test_a_size_beyond_all_numbers_is_a_text() -> None:
    assert size(10**400).endswith(" PB")
    assert size(-(10**400)).endswith(" bytes")

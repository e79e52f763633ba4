"""Two executions of one program agree, whatever the program does. `make identical` has all programs at every level."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.identical.__main__ import start_twice, verdict
from bench.identical.programs import NEEDS, PROGRAMS

EVERYWHERE = [("api", "tensor"), ("aten", "tensor")]
ALSO = [("mix", "tensor"), ("module", "tensor"), ("api", "summary")]
ALL = [pytest.param(name, marks=pytest.mark.needs_torch(*NEEDS[name]) if name in NEEDS else ()) for name in PROGRAMS]
FEW = ["training", "dropout", "generation, cache filled by slices", "empty, filled by pieces"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("identical")
    for names, settings in ((list(PROGRAMS), EVERYWHERE), (FEW, ALSO)):
        for process in start_twice(out, names, settings):
            assert process.wait() == 0
    return out


@pytest.mark.parametrize(("level", "mode"), EVERYWHERE)
@pytest.mark.parametrize("name", ALL)
def test_identical_runs_agree(runs: Path, name: str, level: str, mode: str) -> None:
    assert verdict(runs, name, level, mode) == ""


@pytest.mark.parametrize(("level", "mode"), ALSO)
@pytest.mark.parametrize("name", FEW)
def test_identical_runs_agree_at_other_levels(runs: Path, name: str, level: str, mode: str) -> None:
    assert verdict(runs, name, level, mode) == ""


def test_there_are_thirty_kinds_of_program() -> None:
    assert len(PROGRAMS) >= 30

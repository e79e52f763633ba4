"""Every benchmark starts, and says what it measures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.__main__ import Part, as_markdown, lines_of, run_part
from bench.compare import opening
from tests import warm

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "bench").rglob("*.py")
    if "__main__" in path.read_text()
)


def test_the_programs_are_found() -> None:
    assert {"bench.capture", "bench.compare", "bench.online", "bench.overflow.overhead", "bench.sim"} <= {*PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_starts(program: str) -> None:
    done = warm.run([sys.executable, "-m", program, "--help"], cwd=ROOT)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_every_target_that_was_not_measured_is_a_line_of_its_own(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    broken = Part("bench.compare.opening", "--nonsense", 60, opening.list_targets)
    problem = run_part(broken, report, 60)
    assert problem.startswith("exit 2; see ")
    assert [line["measured"] for line in lines_of(broken, report, problem)] == [f"not measured: {problem}"]
    assert run_part(broken, report, 0) == "no time was left"
    assert run_part(Part("bench.compare.opening", "", 60, opening.list_targets), report, 1) == "not done in 1 s"
    report.write_text('{"calls": 7, "seconds": [0.5, 0.01]}')
    lines = lines_of(broken, report, "")
    assert [(line["measured"], line["reached"]) for line in lines] == [("0.010 s", "yes")]
    assert "| opening 7 calls | ≤ 0.05 s | 0.010 s | yes | python -m bench.compare.opening --nonsense |" in as_markdown(
        {"processor": "", "cores": 2, "load_at_start": 0.0}, lines
    )

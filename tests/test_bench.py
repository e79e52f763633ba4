"""Every benchmark starts, and says what it measures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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

"""A test that starts a process is marked, however deep in fixtures and helpers it does so; any other is not."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import warm
from tests.processes import _is_starter, reachable

CASES = {
    "by itself": ("import subprocess\ndef test(): subprocess.run(['true'])", True),
    "by a name of it": ("from subprocess import run\ndef test(): run(['true'])", True),
    "by a helper": ("from tests.taps.scripts import run_tool\ndef test(): run_tool([], '.')", True),
    "by a module of helpers": ("from tests.taps import scripts\ndef test(): scripts.run_tool([], '.')", True),
    "by a benchmark": ("from bench.identical.__main__ import start_twice\ndef test(): start_twice()", True),
    "in an inner function": ("import subprocess\ndef test():\n    def go(): subprocess.run(['true'])\n    go()", True),
    "by a method": ("import subprocess\nclass A:\n    def go(self): subprocess.run(1)\ndef test(): A().go()", True),
    "by jobs": ("def test(compare): compare(1, jobs=2)", True),
    "by jobs of a command": ("def test(run): run(['compare', '--jobs', '2'])", True),
    "not at all": ("import subprocess, math\ndef other(): subprocess.run(['true'])\ndef test(): math.sqrt(2)", False),
    "not by this helper": ("from tests.taps.scripts import write_script\ndef test(): write_script", False),
}


@pytest.mark.parametrize(("text", "starts"), CASES.values(), ids=CASES)
def test_what_starts_a_process_is_found(text: str, starts: bool) -> None:
    names: dict[str, Any] = {"__name__": "tests.planted"}
    exec(text, names)
    assert any(map(_is_starter, reachable([names["test"]]))) == starts


def test_a_test_with_warm_processes_is_marked(warm_processes: None, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("process") is not None
    assert subprocess.Popen is warm.Popen


def test_a_test_without_processes_is_not(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("process") is None

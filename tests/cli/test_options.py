"""What the commands share: the progress bar, one name for one thing, help without types of flags."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest

from tensorprobe.cli import command, options
from tensorprobe.inject.capture import EndLine
from tests.cli.test_main import run_program

COMMANDS = (
    "capture",
    "compare",
    "find",
    "merge",
    "audit",
    "precheck",
    "overflow",
    "inspect",
    "report",
    "view",
    "export",
    "sim",
    "doctor",
)


def test_there_is_no_bar_without_a_terminal() -> None:
    with options.progress("working") as bar:
        assert bar is None


def test_a_bar_appears_only_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        sys, "__stderr__", sys.stderr
    )  # past the filter for text from outside, which takes out its colours
    with options.progress("working") as bar:
        assert bar is not None
        bar(3)
        assert bar._shown is None
    monkeypatch.setattr(options, "LONG_S", 0.0)
    with options.progress("working") as bar:
        assert bar is not None
        deadline = time.monotonic() + 20
        while bar._shown is None and time.monotonic() < deadline:
            time.sleep(0.01)
        bar.expect(10)
        bar(3)
        assert bar._shown is not None and bar._shown.tasks[0].total == 10
        assert bar._shown is not None and bar._shown.tasks[0].completed == 3
    said = capsys.readouterr()
    assert said.out == "" and "working" in said.err


def test_the_end_of_a_capture_is_a_line_that_vanishes() -> None:
    terminal = io.StringIO()
    line = EndLine(terminal, clock=iter((100.0, 101.9, 102.5, 102.6, 103.0)).__next__)
    for done in range(4):
        line(done << 20, 8 << 20)
    assert terminal.getvalue() == "\rtensorprobe: writing the record, 2.1 MB of 8.39 MB, about 8 s left\x1b[K"
    line(8 << 20, 8 << 20)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_an_end_that_is_quick_shows_nothing() -> None:
    terminal = io.StringIO()
    line = EndLine(terminal, clock=lambda: 0.0)
    line(1, 2)
    line(2, 2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_names_without_types(command: str) -> None:
    page = run_program(command, "--help").stdout
    assert not re.search(r"<[a-z]|\{|\[\[", page)
    assert "--output" not in page and ("--out" not in page or re.search("-o, --out (FOLDER|FILE)", page))


@pytest.mark.parametrize("command", ["capture", "find", "online", "overflow", "sim"])
def test_an_unknown_option_without_dashes_may_be_one_of_the_command(command: str) -> None:
    done = run_program(command, "python", "train.py", "--ovrwrite")
    assert (
        done.returncode == 2
        and f"Put -- before it: tensorprobe {command} [OPTIONS] -- COMMAND --ovrwrite" in done.stderr
    )
    assert ("Did you mean '--overwrite'?" in done.stderr) == (command in ("capture", "online", "overflow"))
    typed = run_program(command, "--ovrwrite", "--", "python", "train.py")
    assert typed.returncode == 2 and "Put -- before" not in typed.stderr


def test_completion_is_offered() -> None:
    assert "--install-completion" in run_program("--help").stdout


def test_what_a_killed_overwrite_left_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("run.1", ".rank.old.run.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text(name)
    with command.aside([tmp_path / "run.1"], unless=lambda: False):
        assert not (tmp_path / "run.1").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run.1"]
    assert (tmp_path / "run.1" / "of").read_text() == "run.1"

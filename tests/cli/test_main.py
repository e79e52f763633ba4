"""The program as a whole: its commands, its exit codes, and where each word goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tensorprobe.cli import main as program
from tensorprobe.version import VERSION

SCRIPT = Path(sys.executable).with_name("tensorprobe")


def run_program(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The installed program, as a user starts it."""
    return subprocess.run([SCRIPT, *arguments], cwd=folder, capture_output=True, text=True)


def test_version_is_printed() -> None:
    done = run_program("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tensorprobe {VERSION}\n", "")


def test_help_names_every_command() -> None:
    done = run_program("--help")
    assert done.returncode == 0
    for command, about in program.COMMANDS.items():
        assert f" {command} " in done.stdout and about in done.stdout  # whole, on a terminal of 80 columns
    for told in (done.stdout, run_program("compare", "--help").stdout):
        assert "--help" in told and "env var" not in told and "TENSORPROBE_" not in told


def test_the_list_of_commands_is_what_their_own_help_says() -> None:
    commands = get_command(program.app).commands  # type: ignore[attr-defined]
    for name, words in program.COMMANDS.items():
        assert " ".join(commands[name].help.split()).startswith(words), name


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from tensorprobe.cli.main import app; sys.argv[1:] = ['--help']; app(standalone_mode=False);"
        "sys.exit(' '.join(name for name in sys.modules if name.startswith('tensorprobe.engine')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "compare" in done.stdout
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("arguments", [["nonsense"], ["inspect"], ["inspect", "x", "--limit", "0"]])
def test_wrong_usage_exits_2_and_says_so_on_stderr(arguments: list[str]) -> None:
    done = run_program(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: tensorprobe" in done.stderr


def test_an_error_is_a_message_and_exit_2_not_a_traceback(tmp_path: Path) -> None:
    done = run_program("inspect", "nowhere", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("RunNotFound: no folder 'nowhere'")
    assert "Traceback" not in done.stderr


def test_a_bug_exits_3_with_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(program, "app", broken)
    with pytest.raises(SystemExit) as exit_:
        program.main()
    said = capsys.readouterr()
    assert (exit_.value.code, said.out) == (3, "")
    assert "ZeroDivisionError: planted" in said.err
    assert said.err.rstrip().endswith("Please report it with the lines above.")


def test_a_reader_that_leaves_early_changes_no_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"'{SCRIPT}' --help | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "Traceback" not in done.stderr
    assert "bug of tensorprobe" not in done.stderr
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("where", ["> /dev/full", ">&-", "2> /dev/full", "2>&-", "> /dev/full 2> /dev/full"])
def test_output_that_cannot_be_written_is_exit_code_2(where: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", f"'{SCRIPT}' inspect nowhere {where}"], capture_output=True, cwd=tmp_path)
    assert done.returncode == 2
    done = subprocess.run(["bash", "-c", f"'{SCRIPT}' --help {where}"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, "No space left" in done.stderr) in ((0, False), (2, "2>" not in where))
    assert (done.returncode == 2) == ("> /dev/full" in where.replace("2>", ""))

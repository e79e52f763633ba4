"""`tensorprobe merge`: what `compare` would have said, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tensorprobe.cli import compare
from tests.builders.ranks import FILES, listed, write_pair, write_ranks, written
from tests.cli.test_main import run_program


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    compare.register(app)
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=True)


def without_time(text: str) -> list[str]:
    """The lines without the one that says how long it took."""
    return [line for line in text.splitlines() if not line.endswith(" s")]


def test_the_answer_is_that_of_one_comparison(tmp_path: Path) -> None:
    runs, out = write_pair(tmp_path), tmp_path / "out"
    expected = invoke("compare", *runs, "-o", out)
    content = written(out)
    for number in (1, 2, 3):
        assert invoke("compare", *runs, "-o", out, "--shard", f"{number}/3").exit_code == 0
    done = invoke("merge", out)
    assert (done.exit_code, without_time(done.stdout)) == (1, without_time(expected.stdout))
    assert len(without_time(done.stdout)) == len(done.stdout.splitlines()) - 1
    assert (written(out), listed(out)) == (content, sorted(FILES))


def test_agreeing_runs_exit_0(tmp_path: Path) -> None:
    runs = write_ranks(tmp_path / "a"), write_ranks(tmp_path / "b")
    invoke("compare", *runs, "-o", tmp_path / "out", "--shard", "1/1", "--format", "csv", "--format", "xlsx")
    done = invoke("merge", tmp_path / "out", "--json")
    assert (done.exit_code, json.loads(done.stdout)["answer"]) == (0, "agrees")
    assert listed(tmp_path / "out") == sorted(["result.csv", "result.xlsx", *FILES[1:]])


@pytest.mark.parametrize(("form", "start"), [("md", "#"), ("junit", "<?xml"), ("github", "::error")])
def test_printed_forms(form: str, start: str, tmp_path: Path) -> None:
    invoke("compare", *write_pair(tmp_path), "-o", tmp_path / "out", "--shard", "1/1")
    done = invoke("merge", tmp_path / "out", "--format", form)
    assert (done.exit_code, done.stdout[: len(start)]) == (1, start)


def test_missing_shards_exit_2(tmp_path: Path) -> None:
    invoke("compare", *write_pair(tmp_path), "-o", tmp_path / "out", "--shard", "1/2")
    done = run_program("merge", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"CannotCompare: '{tmp_path / 'out'}' holds 1 of 2 shards; 2 is missing.")

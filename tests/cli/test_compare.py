"""`tensorprobe compare` as a user starts it: the answer on stdout, exit codes, and which options go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tensorprobe.cli import compare
from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.model.comparison import Comparison
from tensorprobe.report.forms import names_for
from tests.builders.ranks import FILES, listed, write_pair, write_ranks, written


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    compare.register(app)
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=True)


def test_runs_that_part_exit_1_with_the_place_first(tmp_path: Path) -> None:
    done = invoke(*write_pair(tmp_path))
    assert done.exit_code == 1
    assert done.stdout.startswith("DIVERGED  first at step 1, rank 2: Torch.matmul.0.forward, output.0")
    assert "train.py:12" in done.stdout.splitlines()[0]
    assert "2 other ranks diverge" in done.stdout
    assert done.stderr == ""


def test_runs_that_agree_exit_0(tmp_path: Path) -> None:
    done = invoke(write_ranks(tmp_path / "a"), write_ranks(tmp_path / "b"))
    assert (done.exit_code, done.stdout[:6]) == (0, "AGREES")


def test_jobs_and_output(tmp_path: Path) -> None:
    runs = write_pair(tmp_path)
    assert invoke(*runs, "-o", tmp_path / "out").exit_code == 1
    expected = written(tmp_path / "out")
    done = invoke(*runs, "-o", tmp_path / "out", "--jobs", 2, "--json")
    assert done.exit_code == 1
    assert written(tmp_path / "out") == expected
    assert json.loads(done.stdout)["divergence"]["rank"] == 2


@pytest.mark.parametrize(
    ("forms", "tables"),
    [
        (["csv"], ["result.csv"]),
        (["csv", "parquet"], ["result.csv", "result.parquet"]),
        (["xlsx", "json"], ["result.parquet", "result.xlsx"]),
        (["xlsx", "csv"], ["result.csv", "result.xlsx"]),
    ],
)
def test_table_forms_are_files(forms: list[str], tables: list[str], tmp_path: Path) -> None:
    options = [part for form in forms for part in ("--format", form)]
    done = invoke(*write_pair(tmp_path), "-o", tmp_path / "out", *options)
    assert done.exit_code == 1
    assert listed(tmp_path / "out") == sorted([*tables, *FILES[1:]])
    assert done.stdout.startswith("{" if "json" in forms else "DIVERGED")


@pytest.mark.parametrize(
    ("form", "start"), [("md", "#"), ("junit", "<?xml"), ("github", "::error"), ("text", "DIVERGED"), ("json", "{")]
)
def test_printed_forms(form: str, start: str, tmp_path: Path) -> None:
    done = invoke(*write_pair(tmp_path), "--format", form)
    assert done.exit_code == 1
    assert done.stdout.startswith(start)


def test_forms_are_written_to_files_beside_what_is_printed(tmp_path: Path) -> None:
    forms = {"md": "#", "junit": "<?xml", "csv": '"step","rank"', "json": "{", "parquet": "PAR1", "xlsx": "PK"}
    options = [part for form in forms for part in ("--format", f"{form}={tmp_path / form}")]
    done = invoke(*write_pair(tmp_path), *options)
    assert (done.exit_code, done.stdout[:8]) == (1, "DIVERGED")
    for form, start in forms.items():
        assert (tmp_path / form).read_bytes().startswith(start.encode()), form
    assert (tmp_path / "md").read_text() == invoke(*write_pair(tmp_path), "--format", "md").stdout.rstrip("\n") + "\n"
    refused = invoke(*write_pair(tmp_path), "--format", f"md={tmp_path}")
    assert "cannot write" in str(refused.exception)


def test_the_old_spelling_of_out_works(tmp_path: Path) -> None:
    assert invoke(*write_pair(tmp_path), "--output", tmp_path / "out").exit_code == 1
    assert listed(tmp_path / "out") == sorted(FILES)


def test_a_shard_says_what_comes_next(tmp_path: Path) -> None:
    runs, out = write_pair(tmp_path), tmp_path / "my out"
    done = invoke(*runs, "-o", out, "--shard", "2/2")
    assert (done.exit_code, done.stdout) == (
        0,
        "SHARD 2 of 2  rank 1 of 3; 6 pairs of calls compared\n"
        f"Still missing: 1/2. Then:   tensorprobe merge '{out}'\n",
    )
    done = invoke(*runs, "-o", out, "--shard", "1/2")
    assert done.stdout.endswith(f"All shards are done. Next:   tensorprobe merge '{out}'\n")
    done = invoke(*runs, "-o", tmp_path / "many", "--shard", "20/20")
    assert done.stdout == (
        "SHARD 20 of 20  no rank of 3; 0 pairs of calls compared\n"
        "Still missing: 1/20, 2/20, 3/20, 4/20, 5/20, 6/20, 7/20, 8/20, 9/20, 10/20 and 9 more. "
        f"Then:   tensorprobe merge {tmp_path / 'many'}\n"
    )


WRONG = [
    (["--format", "csv"], "--format csv writes a file: add -o FOLDER, or --format csv=FILE"),
    (["--format", "xml"], f"unknown format 'xml'; expected {names_for(Comparison)}"),
    (["--format", "markdwn"], "unknown format"),
    (["--format", "md="], "the file is missing after '='"),
    (["--format", "md=nowhere/x.md"], "there is no folder 'nowhere'"),
    (["--format", "md", "--format", "junit"], "only one format can be printed, got md, junit"),
    (["--format", "md", "--json"], "only one format can be printed, got md, json"),
    (["-o", "x", "--output", "y"], "--out is given twice"),
    (["--shard", "1/2"], "--shard writes its part into a folder that all shards share: add -o FOLDER"),
    (["--shard", "1/2", "-o", "x", "--json"], "a shard has no answer to print"),
    (["--shard", "1/2", "-o", "x", "--format", "md"], "a shard has no answer to print"),
    (["--shard", "1/2", "-o", "x", "--format", "csv", "--format", "parquet"], "--format csv needs a file here"),
    (["--shard", "2/1", "-o", "x"], "it must be i/n with i from 1 to n"),
    (["--address", "auto"], "it needs engine 'ray'"),
    (["--engine", "ray", "--jobs", "3"], "but the cluster decides"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str) -> None:
    done = invoke("no such run", "nor this", *options)
    assert isinstance(done.exception, SettingsError)
    assert message in str(done.exception)


def test_no_cluster_cannot_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = invoke(*write_pair(tmp_path), "--engine", "ray")
    assert isinstance(done.exception, CannotCompare)
    assert "--jobs N" in str(done.exception)

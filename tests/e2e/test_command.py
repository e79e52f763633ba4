"""`tensorprobe compare` on real runs: every form of output, the shipped schema, exit codes, what goes where."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import jsonschema
import openpyxl
import pyarrow.parquet
import pytest

import tensorprobe
from tensorprobe import report
from tests.e2e.programs import Done, Program, command, other_epsilon, scale_second_layer
from tests.taps.scripts import run_tool

SCHEMA_FILE = Path(report.__file__).with_name("comparison.schema.json")
NAMED = "Functional.layer_norm.1.forward"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "right": Program().record(folder / "right"),
        "epsilon": Program(change=other_epsilon).record(folder / "epsilon"),
        "scaled": Program(change=scale_second_layer).record(folder / "scaled"),
        "summary": Program(change=other_epsilon, settings={"mode": "summary"}).record(folder / "summary"),
        "structure": Program(settings={"mode": "structure"}).record(folder / "structure"),
    }


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: str | Path) -> Done:
        return command(capsys, monkeypatch, "compare", *arguments)

    return run


def test_text_says_the_answer_first_and_the_next_command_last(runs: dict[str, Path], tool: Any) -> None:
    done = tool(runs["right"], runs["epsilon"])
    lines = done.out.splitlines()
    assert (done.code, done.err) == (1, "")
    assert lines[0].startswith(
        f"DIVERGED  first at step 0, rank 0: {NAMED} in module 'blocks.1.norm', output.0 (float32 [4, 8, 16])"
    )
    assert "inputs agree exactly" in lines[1] and "introduced here" in lines[1] and "allowed" in lines[1]
    assert lines[-1].startswith("Look at it:   tensorprobe diff")
    assert not any("\x1b" in line for line in lines)


def test_the_next_command_works(runs: dict[str, Path], tool: Any, tmp_path: Path) -> None:
    import shlex

    last = tool(runs["right"], runs["epsilon"]).out.splitlines()[-1]
    words = shlex.split(last.partition("tensorprobe ")[2])
    assert NAMED in run_tool(list(words), tmp_path, code=1).stdout


def test_exit_codes(runs: dict[str, Path], tool: Any, tmp_path: Path) -> None:
    assert tool(runs["right"], runs["right"]).code == 0
    assert tool(runs["right"], runs["scaled"]).code == 1
    assert tool(runs["right"], tmp_path / "absent").code == 2
    assert tool(runs["right"]).code == 2


@pytest.mark.parametrize(
    ("pair", "code"),
    [(("right", "right"), 0), (("right", "epsilon"), 1), (("right", "scaled"), 1), (("right", "summary"), 1)],
)
def test_json_is_of_the_shipped_schema_and_changes_no_exit_code(
    pair: tuple[str, str], code: int, runs: dict[str, Path], tool: Any
) -> None:
    done = tool(*(runs[name] for name in pair), "--json")
    assert done.code == code
    told = json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    jsonschema.validate(told, json.loads(SCHEMA_FILE.read_text()))
    assert (told["exit_code"], told["answer"]) == (code, "diverged" if code else "agrees")
    assert told == {
        **json.loads(tensorprobe.compare(*(runs[name] for name in pair)).to_json()),
        "elapsed_s": told["elapsed_s"],
    }


def test_json_with_nan_in_it_is_standard(tmp_path: Path, tool: Any) -> None:
    import numpy as np

    from tests.builders.runs import call, write

    value = np.array([np.nan, np.inf, 1.0, 2.0], np.float32)
    a, b = (
        write(tmp_path / name, [call("Functional.gelu.0.forward", outputs=[value * scale])])
        for name, scale in (("a", 1), ("b", -1))
    )
    done = tool(a, b, "--format", "json")
    told = json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    jsonschema.validate(told, json.loads(SCHEMA_FILE.read_text()))


@pytest.mark.parametrize("form", ["text", "json", "md", "junit", "github"])
@pytest.mark.parametrize("other", ["right", "epsilon", "scaled", "summary"])
def test_every_printed_form_names_the_call_or_says_that_all_agrees(
    form: str, other: str, runs: dict[str, Path], tool: Any
) -> None:
    done = tool(runs["right"], runs[other], "--format", form)
    assert done.code == (0 if other == "right" else 1) and done.err == ""
    named = {"scaled": "Functional.linear.1.forward", "epsilon": NAMED, "summary": NAMED}
    assert named.get(other, "agree") in done.out.lower() or named.get(other, "agree") in done.out
    if other == "scaled":
        assert "scaled by 1.01" in done.out
    if form == "junit":
        suite = ElementTree.fromstring(done.out)
        failures = suite.findall(".//failure")
        assert bool(failures) == (other != "right")
    if form == "github":
        assert all(line.startswith(("::error", "::warning", "::notice")) for line in done.out.splitlines())
        assert done.out.startswith("::notice" if other == "right" else "::error")


@pytest.mark.parametrize("form", ["csv", "parquet", "xlsx"])
def test_every_table_has_a_row_for_each_pair_of_tensors(
    form: str, runs: dict[str, Path], tool: Any, tmp_path: Path
) -> None:
    done = tool(runs["right"], runs["epsilon"], "-o", tmp_path / "out", "--format", form)
    assert done.code == 1 and done.out.startswith("DIVERGED")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    jsonschema.validate(summary, json.loads(SCHEMA_FILE.read_text()))
    if form == "csv":
        rows = len((tmp_path / "out" / "result.csv").read_text().splitlines()) - 1
    elif form == "parquet":
        rows = pyarrow.parquet.read_table(tmp_path / "out" / "result.parquet").num_rows
    else:
        rows = openpyxl.load_workbook(tmp_path / "out" / "result.xlsx", read_only=True).active.max_row - 1
    assert rows == summary["rows"] > 0
    advice = (tmp_path / "out" / "advisor.txt").read_text()
    assert f"Suspect Nodes: {NAMED}.output.0" in advice
    assert not [name for name in (tmp_path / "out").iterdir() if name.name.startswith(".")]


def test_the_line_in_the_advice_is_the_line_in_the_table(runs: dict[str, Path], tool: Any, tmp_path: Path) -> None:
    tool(runs["right"], runs["epsilon"], "-o", tmp_path / "out", "--format", "csv")
    advice = dict(
        line.split(": ", 1) for line in (tmp_path / "out" / "advisor.txt").read_text().splitlines() if ": " in line
    )
    row = (tmp_path / "out" / "result.csv").read_text().splitlines()[int(advice["Line"]) - 1]
    assert NAMED in row and '"output.0"' in row and '"diverges"' in row


def test_a_failed_comparison_leaves_the_earlier_result(runs: dict[str, Path], tool: Any, tmp_path: Path) -> None:
    tool(runs["right"], runs["epsilon"], "-o", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert tool(runs["right"], runs["right"], "-o", tmp_path / "out", "--steps", "9").code == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert tool(runs["right"], tmp_path / "absent", "-o", tmp_path / "new").code == 2
    assert not (tmp_path / "new").exists()


def test_statistics_are_weaker_and_the_text_says_so(runs: dict[str, Path], tool: Any) -> None:
    done = tool(runs["right"], runs["summary"])
    assert done.code == 1 and NAMED in done.out.splitlines()[0]
    assert "by statistics only (weaker)" in done.out


@pytest.mark.parametrize("pair", [("right", "structure"), ("structure", "right")])
def test_runs_without_one_tensor_in_common_do_not_agree(
    pair: tuple[str, str], runs: dict[str, Path], tool: Any
) -> None:
    """Names that are alike say nothing of values: `nothing compared` is not success."""
    done = tool(*(runs[name] for name in pair))
    assert done.code == 2, done.out
    assert not done.out.startswith("AGREES")


def test_two_runs_of_structure_do_not_claim_that_outputs_agree(runs: dict[str, Path], tool: Any) -> None:
    done = tool(runs["structure"], runs["structure"])
    assert "no output diverges" not in done.out
    assert "not one pair of tensors could be measured" in done.out + done.err


def test_compare_is_read_only(runs: dict[str, Path], tool: Any, tmp_path: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        return sorted(
            (str(path), path.stat().st_mtime_ns, path.stat().st_size)
            for name in ("right", "epsilon")
            for path in runs[name].rglob("*")
        )

    before = state()
    tool(runs["right"], runs["epsilon"], "-o", tmp_path / "out")
    assert state() == before

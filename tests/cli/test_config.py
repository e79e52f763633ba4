"""Settings from a file and the environment: a flag beats a variable, which beats the file, which beats the default."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest

from tests.builders.runs import call, write
from tests.taps.scripts import run_tool


def config(folder: Path, *words: str, **variables: str) -> dict[str, tuple[str, str]]:
    lines = json.loads(run_tool(["config", "--json", *words], folder, **variables).stdout)
    return {line["setting"]: (line["value"], line["source"]) for line in lines}


def test_every_setting_is_shown_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "tensorprobe.toml").write_text(
        '[compare]\njobs = 4\nprove = "off"\nstrip_prefix = "module"\nlimit = 3\n'
    )
    variables = {"TENSORPROBE_COMPARE_PROVE": "all", "TENSORPROBE_COMPARE_LIMIT": "4"}
    shown = config(tmp_path, "compare", "a", "b", "--limit", "5", **variables)
    assert shown["jobs"] == ("4", "file: tensorprobe.toml")
    assert shown["strip-prefix"] == ("module", "file: tensorprobe.toml")
    assert shown["prove"] == ("all", "environment: TENSORPROBE_COMPARE_PROVE")
    assert shown["limit"] == ("5", "flag")
    assert shown["policy"] == ("noise-aware", "default")
    text = run_tool(["config"], tmp_path).stdout
    assert f"File: {tmp_path / 'tensorprobe.toml'}" in text
    assert all(f"[{command}]" in text for command in ("capture", "compare", "precheck", "overflow"))


def test_a_table_of_pyproject_is_found_from_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.tensorprobe.capture]\nmode = "summary"\nop = "linear"\n'
    )
    (tmp_path / "deep" / "er").mkdir(parents=True)
    shown = config(tmp_path / "deep" / "er", "capture")
    assert shown["mode"] == ("summary", "file: pyproject.toml") and shown["op"] == ("linear", "file: pyproject.toml")


def test_the_commands_use_the_file(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0 + 1e-7)):
        write(tmp_path / name, [call("Torch.exp.0.forward", outputs=[numpy.full(4, value, "float32")])])
    assert run_tool(["compare", "a", "b"], tmp_path).returncode == 0
    (tmp_path / "tensorprobe.toml").write_text('[compare]\npolicy = "bitwise"\n')
    assert "policy bitwise" in run_tool(["compare", "a", "b"], tmp_path, code=1).stdout
    run_tool(["compare", "a", "b", "--policy", "noise-aware"], tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[compare]\njob = 3\n", "unknown setting 'job' of [compare] in .*tensorprobe.toml. Did you mean 'jobs'"),
        ("[compar]\njobs = 3\n", "unknown command 'compar' in .*tensorprobe.toml. Did you mean 'compare'"),
        ("jobs = 3\n", "'jobs' in .*tensorprobe.toml belongs to no command. Put it into a table"),
        ("[compare]\njobs = [3]\n", "'jobs' of [compare] in .* is a list; expected one value"),
        ('[compare]\njobs = "many"\n', "'jobs' of [compare] in .*tensorprobe.toml: .*integer"),
        ("[compare\n", "tensorprobe.toml' is not valid TOML"),
        ("compare = 3\n", "'compare' in .* is 3; expected a table"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "tensorprobe.toml").write_text(text)
    done = run_tool(["compare", "a", "b"], tmp_path, code=2)
    assert re.search(told.replace("[", r"\["), done.stderr), done.stderr


def test_a_misspelt_variable_is_named(tmp_path: Path) -> None:
    done = run_tool(["compare", "a", "b"], tmp_path, code=2, TENSORPROBE_COMPARE_POLICYY="bitwise")
    assert "'TENSORPROBE_COMPARE_POLICYY' in the environment. Did you mean 'TENSORPROBE_COMPARE_POLICY'?" in done.stderr


def test_a_pyproject_of_others_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[broken\n")
    assert config(tmp_path, "compare")["jobs"] == ("1", "default")

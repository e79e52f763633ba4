"""The same training under the published msprobe and under ours: the same dump, and no difference for either compare."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorprobe
from tests import warm

TOP = Path(__file__).resolve().parents[2]
PEER = TOP / ".venv-peer" / "bin"
OURS = Path(sys.executable).parent
PROGRAMS = ("cnn", "encoder", "gpt", "lstm", "attention", "in_place", "passing")
MODES = {"statistics": ("statistics", "statistics"), "tensor": ("tensor", "statistics"), "md5": ("statistics", "md5")}
WAYS = [*(("mix", mode) for mode in MODES), ("L0", "statistics"), ("L1", "statistics")]
CASES = [pytest.param(program, *way, marks=pytest.mark.xdist_group(program)) for program in PROGRAMS for way in WAYS]
"""A program, level and mode; one worker has all of a program, since the tests share its dumps."""
STEPS = 2
ONLY_OURS = {
    "cnn": {"Module.2.ReLU.backward.0", "Module.1.BatchNorm2d.backward.0"},
    "lstm": {"VF.lstm.0.forward", "VF.lstm.0.backward"},
    "attention": {"Module.attention.MultiheadAttention.parameters_grad.1"},
    "in_place": {
        *("Tensor.__setitem__.0.backward", "Tensor.mul_.0.backward", "Tensor.__iadd__.0.backward"),
        "Module.linear.Linear.backward.0",
    },
}
"""Program → what the published tool lacks: a backward after a write in place, `VF.lstm`, a gradient for each call."""
ONLY_PUBLISHED = {
    "passing": {
        *("Module.4.Identity.backward.0", "Module.2.Dropout.backward.0", "Module.1.Identity.backward.0"),
        "Functional.dropout.0.backward",
    },
}
"""Program → what ours lacks: the backward of a call that returns its input."""

Json = dict[str, Any]
Dumps = Callable[[str, str, str], tuple[Path, Path]]


Run = Callable[..., None]


@pytest.fixture(scope="session")
def run_published() -> Iterator[Run]:
    """Run a script, or `msprobe`, in the environment of the published tool, in a folder; it must end with exit code 0."""
    command = [PEER / "python", TOP / "bench/peer/forks.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        asked, answers = server.stdin, server.stdout
        assert asked is not None and answers is not None

        def run(folder: Path, *command: str | Path) -> None:
            asked.write(json.dumps([str(folder), *map(str, command)]) + "\n")
            asked.flush()
            code, output = json.loads(answers.readline())
            assert code == 0, output

        yield run


def run_ours(folder: Path, *command: str | Path) -> None:
    done = warm.run(command, cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory, run_published: Run) -> Dumps:
    """Return the folders of the two dumps of a program, the published one first; each program is run once."""
    made: dict[tuple[str, str, str], tuple[Path, Path]] = {}

    def dump(program: str, level: str, mode: str) -> tuple[Path, Path]:
        key = (program, level, mode)
        if key not in made:
            task, summary = MODES[mode]
            folder = tmp_path_factory.mktemp("-".join(key))
            script = TOP / "bench/peer/programs.py"
            for who, run, start in (
                ("published", run_published, [script]),
                ("ours", run_ours, [sys.executable, script]),
            ):
                config = {"task": task, "dump_path": str(folder / who), "rank": [], "step": [], "level": level}
                config |= {"tensor": {}, "statistics": {"summary_mode": summary}}
                (folder / f"{who}.json").write_text(json.dumps(config))
                run(folder, *start, program, folder / f"{who}.json")
            made[key] = folder / "published", folder / "ours"
        return made[key]

    return dump


def read(folder: Path, step: int, name: str = "dump.json") -> Json:
    (file,) = (folder / f"step{step}").rglob(name)
    content: Json = json.loads(file.read_text())
    return content.get("data", content)


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two entries differ; figures may be rounded otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            if key not in ("data_name", "md5"):
                yield from differences(one.get(key, "absent"), other.get(key, "absent"), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}.{at}")
    elif isinstance(one, float) and isinstance(other, (int, float)):
        if not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) and one == one:
            yield f"{path}: {one} | {other}"
    elif one != other:
        yield f"{path}: {one} | {other}"


@pytest.mark.parametrize(("program", "level", "mode"), CASES)
def test_the_dumps_are_the_same(program: str, level: str, mode: str, dumps: Dumps) -> None:
    published, ours = dumps(program, level, mode)
    for step in range(STEPS):
        theirs, own = read(published, step), read(ours, step)
        assert {*theirs} - {*own} <= ONLY_PUBLISHED.get(program, set())
        assert {*own} - {*theirs} <= ONLY_OURS.get(program, set())
        forward = [name for name in theirs if ".forward" in name]
        assert forward == [name for name in own if ".forward" in name and name in theirs]
        assert not [at for name in forward for at in differences(theirs[name], own[name], name)]
        if level != "L1":
            parents, own_parents = read(published, step, "construct.json"), read(ours, step, "construct.json")
            assert {name: parents[name] for name in forward} == {name: own_parents[name] for name in forward}
        if level == "L0":
            several = "MultiheadAttention" if program in ("attention", "encoder") else "no such module"
            both = [name for name in theirs if name in own and several not in name]
            nested = "LSTM.backward"  # a list more around the gradients of its second result
            wrong = [at for name in both if nested not in name for at in differences(theirs[name], own[name], name)]
            assert not wrong


@pytest.mark.parametrize(("program", "level", "mode"), CASES)
def test_our_compare_finds_no_difference_in_either_direction(program: str, level: str, mode: str, dumps: Dumps) -> None:
    published, ours = dumps(program, level, mode)
    for baseline, candidate in ((published, ours), (ours, published)):
        result = tensorprobe.compare(baseline, candidate, prove="off")
        assert result.exit_code == 0, str(result)
        assert result.summary.buckets.only_baseline == result.summary.buckets.only_candidate == 0
        if (program, mode) != ("encoder", "md5"):  # its hooks make torch take another path, with other bits
            rows = table(run_ours, OURS / "msprobe", baseline, candidate)
            assert {row_result(row) for row in rows} <= {"Yes", "pass", "N/A"}
            assert len([row for row in rows if row_result(row) != "N/A"]) > len(rows) / 2


@pytest.mark.parametrize(("program", "level", "mode"), CASES)
def test_its_compare_finds_no_difference_in_forward_calls(
    program: str, level: str, mode: str, dumps: Dumps, run_published: Run
) -> None:
    published, ours = dumps(program, level, mode)
    if mode == "md5":
        return  # digests that it took after later writes differ from its own, too
    for baseline, candidate in ((published, ours), (ours, published)):
        rows = [row for row in table(run_published, "msprobe", baseline, candidate) if ".forward" in row["NPU Name"]]
        lacking = {row["NPU Name"] for row in rows if row["Bench Name"] == "N/A"}
        assert all(name.startswith("VF.lstm") for name in lacking)
        wrong = [row for row in rows if row_result(row) not in ("pass", "Yes") and not is_rounding(row)]
        assert not wrong, wrong


def is_rounding(row: dict[str, str]) -> bool:
    """Whether it warns of a norm whose sum was rounded otherwise: any error is ten times that of inputs that agree exactly."""
    return row["Result"] == "warning" and float(row["NormRelativeErr"].rstrip("%")) < 1e-4


def table(run: Run, tool: str | Path, bench: Path, npu: Path) -> list[dict[str, str]]:
    """The table that `msprobe compare` of one of the tools writes of step 0."""
    files = [next((folder / "step0").rglob("dump.json")) for folder in (npu, bench)]
    out = npu.parent / f"{run.__name__}-{npu.name}"
    run(npu.parent, tool, "compare", "-tp", files[0], "-gp", files[1], "-o", out)
    (written,) = out.glob("compare_result_*.csv")
    with written.open(encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def row_result(row: dict[str, str]) -> str:
    return row.get("Accuracy Reached or Not") or row["Result"]


@pytest.mark.xdist_group("gpt")
@pytest.mark.parametrize("call", ["Functional.softmax.1.forward", "Functional.layer_norm.3.backward"])
def test_a_wrong_result_in_the_published_dump_is_named(call: str, dumps: Dumps, tmp_path: Path) -> None:
    published, ours = dumps("gpt", "mix", "statistics")
    (file,) = (published / "step0").rglob("dump.json")
    content = json.loads(file.read_text())
    tensor = content["data"][call]["output"][0]
    tensor |= {name: tensor[name] * 1.05 for name in ("Max", "Norm")}
    (tmp_path / "dump.json").write_text(json.dumps(content))
    (own,) = (ours / "step0").rglob("dump.json")
    for baseline, candidate in ((own, tmp_path / "dump.json"), (tmp_path / "dump.json", own)):
        result = tensorprobe.compare(baseline, candidate)
        assert result.exit_code == 1 and f": {call}" in str(result).splitlines()[0]

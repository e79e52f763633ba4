"""msprobe from end to end: a user's script for every task and level, on the CPU, on the simulated NPU, and on two ranks.

The script runs once in each place, over all configs; a second time on an NPU whose softmax is wrong. What it leaves is compared
and checked as a user would. TENSORPROBE_PEER=1 adds the round trip with the published package in .venv-peer.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from msprobe.pytorch import PrecisionDebugger, compare, compare_distributed
from tensorprobe.legacy.msprobe.cli import run as run_msprobe
from tests.builders.checker import read_strictly
from tests.compat.msprobe_net import files_of, forget_debugger
from tests.compat.reading import read_csv
from tests.taps.scripts import SOURCE, run_python, run_tool

pytestmark = pytest.mark.xdist_group("msprobe-guide")  # one worker, so that the script runs once in each place

Json = dict[str, Any]
SCRIPT = Path(__file__).with_name("msprobe_guide_script.py")
TOP = SCRIPT.parents[2]
PEER = TOP / ".venv-peer" / "bin"
LEVELS = ("L0", "L1", "L2", "mix")
TASKS = {
    "statistics": LEVELS,
    "tensor": LEVELS,
    "structure": ("L0", "mix"),  # other levels become mix: calls by themselves have no structure
    "run_ut": ("L1", "mix"),  # API calls are checked: other levels are refused
    "overflow_check": LEVELS,
}
EVERYTHING = [f"{task}-{level}" for task, levels in TASKS.items() for level in levels]
COMPARED = ["statistics-L1", *(f"tensor-{level}" for level in LEVELS)]
CONFIGS = {
    "cpu": {"cpu": EVERYTHING},
    "npu": {
        "npu": [name for name in EVERYTHING if name not in ("run_ut-mix", "overflow_check-L0", "overflow_check-L2")]
    },
    "faulty": {"npu": COMPARED},
    "ranks": {
        "cpu": ["tensor-mix", "tensor-L2", "structure-L0"],
        "npu": ["tensor-mix", "statistics-L0", "run_ut-L1", "overflow_check-L1"],
    },
}
"""Place → device → what is dumped. The processors of the tests are few: what was seen on one device need not be on all."""
FAULT = "softmax-tail"
_ON_RANK_1 = json.dumps({"op": "aten::_softmax", "kind": "tail", "block": 4, "rank": 1})
FAULTS = {"npu": [], "faulty": ["--fault", FAULT], "ranks": ["--fault", _ON_RANK_1]}
FAULTY_CALLS = {
    "L0": "Module.attention.softmax.Softmax.forward.0",
    "L1": "Functional.softmax.0.forward",
    "L2": "Aten._softmax.default.0.forward",
    "mix": "Functional.softmax.0.forward",
}
OVERFLOW = "Torch.matmul.0.forward"
PUBLISHED = """
    Functional.embedding.0.forward Module.token.Embedding.forward.0 Tensor.__mul__.0.forward Functional.linear.0.forward
    Module.attention.parts.Linear.forward.0 Torch.matmul.0.forward Tensor.masked_fill.0.forward Functional.softmax.0.forward
    Module.attention.softmax.Softmax.forward.0 Torch.matmul.1.forward Module.attention.Attention.forward.0
    Tensor.__add__.0.forward Functional.layer_norm.0.forward Module.norm.LayerNorm.forward.0 Functional.gelu.0.forward
    Functional.linear.1.forward Module.head.Linear.forward.0 Functional.cross_entropy.0.forward
    Functional.cross_entropy.0.backward Functional.linear.1.backward Module.head.Linear.parameters_grad.0
    Module.head.Linear.backward.0 Functional.gelu.0.backward Functional.layer_norm.0.backward
    Module.norm.LayerNorm.parameters_grad.0 Module.norm.LayerNorm.backward.0 Tensor.__add__.0.backward
    Torch.matmul.1.backward Functional.softmax.0.backward Module.attention.softmax.Softmax.backward.0
    Tensor.masked_fill.0.backward Torch.matmul.0.backward Functional.linear.0.backward
    Module.attention.parts.Linear.parameters_grad.0 Module.attention.parts.Linear.backward.0
    Module.attention.Attention.backward.0 Tensor.__mul__.0.backward Module.token.Embedding.backward.0
    Functional.embedding.0.backward Module.token.Embedding.parameters_grad.0
""".split()
"""What mindstudio-probe 26.2.0 dumps of the script, at level mix."""


def write_config(folder: Path, name: str) -> str:
    """A config.json as a user writes it, whose dump goes into a folder of its name."""
    task, level = name.split("-")
    steps = [] if task == "overflow_check" else [0]
    config = {"task": task, "dump_path": str(folder / name), "rank": [], "step": steps, "level": level, task: {}}
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


class Ran(NamedTuple):
    """The folder in which the script has run, and what it said of each config, once for each rank."""

    folder: Path
    said: list[Json]


Places = Callable[[str], Ran]
everywhere = pytest.mark.parametrize("place", ["cpu", "npu", "faulty", "ranks"])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Runs the script in a place, once."""

    @functools.cache
    def run(place: str) -> Ran:
        folder = tmp_path_factory.mktemp(place)
        paths = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{TOP}"}
        script: list[str | Path] = [SCRIPT]
        for device, names in CONFIGS[place].items():
            for name in names:
                script += [device, write_config(folder / device, name)]
        if place == "cpu":
            done = run_python(script, folder, **paths)
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            python = [sys.executable, *launch] if place == "ranks" else [sys.executable]
            done = run_tool(["sim", *FAULTS[place], "--", *python, *script], folder, **paths)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return Ran(folder if place == "ranks" else folder / device, lines)

    return run


def find_dump(folder: Path, name: str, step: int = 0) -> Path:
    """The dump.json of the only process."""
    (found,) = (folder / name / f"step{step}").iterdir()
    assert re.fullmatch(r"proc\d+", found.name)
    return found / "dump.json"


def failing(rows: list[Json]) -> list[str]:
    """The tensors whose rows fail, in their order."""
    verdict = "Result" if "Result" in rows[0] else "Accuracy Reached or Not"
    return [row["NPU Name"] for row in rows if row[verdict] not in ("pass", "Yes")]


@everywhere
def test_training_is_the_same_to_the_last_bit_and_nothing_is_left_installed(places: Places, place: str) -> None:
    said = places(place).said
    assert len(said) == sum(map(len, CONFIGS[place].values())) * (2 if place == "ranks" else 1)
    for line in said:
        if "overflow_check" in line["config"]:
            assert re.fullmatch(
                r"\[overflow 1 times\]: dump file is saved in '.*/step1/(proc|rank)\d+/dump.json'\.", line["overflow"]
            )
        else:
            assert {name: line[name] for name in ("losses", "weights")} == line["plain"], line["config"]
        assert line["installed"] == 0, line["config"]


def dumps(ran: Ran) -> Iterator[tuple[str, str, Path]]:
    """Task, level and folder of every dump but those of overflows."""
    for config in sorted({line["config"] for line in ran.said}):
        task, level = Path(config).stem.split("-")
        if task != "overflow_check":
            assert [path.name for path in Path(config).with_suffix("").iterdir()] == ["step0"]
            for folder in (Path(config).with_suffix("") / "step0").iterdir():
                yield task, level, folder


@everywhere
def test_every_task_and_level_leaves_its_files(places: Places, place: str) -> None:
    kinds = {"L0": ("Module.",), "L1": ("Functional.", "Tensor.", "Torch.", "Distributed."), "L2": ("Aten.",)}
    kinds["mix"] = kinds["L0"] + kinds["L1"]
    for task, level, folder in dumps(places(place)):
        head = read_strictly(folder / "dump.json")
        data = head["data"]
        assert (head["task"], head["level"], head["framework"]) == (task, level, "pytorch")
        assert all(name.startswith(kinds[level]) for name in data), folder
        assert any("backward" in name for name in data) and any("forward" in name for name in data), folder
        values = set(files_of(data))
        assert bool(values) == (task == "tensor"), folder
        kept = folder / "dump_tensor_data"
        assert ({path.name for path in kept.iterdir()} if kept.exists() else set()) == values, folder
        assert ('"Norm"' in (folder / "dump.json").read_text()) == (task != "structure"), folder
        parents = read_strictly(folder / "construct.json")
        assert bool(parents) == (level != "L1") and set(parents) <= {*data, *parents.values()}, folder
        stacks = {name for names, _ in read_strictly(folder / "stack.json").values() for name in names}
        assert stacks and stacks <= set(data), folder


@pytest.mark.parametrize("place", ["cpu", "npu"])
def test_an_overflow_is_dumped_where_it_starts(places: Places, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The infinities of the mask, which are meant, are none."""
    (names,) = CONFIGS[place].values()
    for name in [name for name in names if name.startswith("overflow_check")]:
        assert read_strictly(find_dump(places(place).folder, name))["data"] == {}
        dump = find_dump(places(place).folder, name, step=1)
        assert list(read_strictly(dump)["data"]) == [OVERFLOW]
        assert run_msprobe(["overflow_check", "-i", str(dump.parents[1]), "-o", name]) == 1
        assert f"in {OVERFLOW}" in capsys.readouterr().out
    assert run_msprobe(["-f", "pytorch", "run_overflow_check", "-api_info", str(dump)]) == 0
    assert capsys.readouterr().out.startswith(f"{OVERFLOW}: normal: ")


def compare_places(places: Places, ours: str, theirs: str, name: str) -> list[Json]:
    npu, bench = (find_dump(places(place).folder, name) for place in (ours, theirs))
    return read_csv(compare({"npu_path": str(npu), "bench_path": str(bench)}, f"{ours}-{theirs}"))


@pytest.mark.simulated
@pytest.mark.parametrize("name", COMPARED)
def test_compare_names_the_planted_fault(places: Places, name: str) -> None:
    rows = compare_places(places, "faulty", "npu", name)
    assert failing(rows)[0] == f"{FAULTY_CALLS[name.split('-')[1]]}.output.0"


@pytest.mark.simulated
@pytest.mark.parametrize("name", [name for name in COMPARED if "L2" not in name])
def test_a_right_device_agrees_with_the_cpu(places: Places, name: str) -> None:
    """At level L2 the two are made of other operators."""
    rows = compare_places(places, "npu", "cpu", name)
    assert len(rows) > 30 and failing(rows) == []


@pytest.mark.simulated
def test_the_program_ends_with_what_it_has_found(places: Places, tmp_path: Path) -> None:
    """Exit code 1: the dumps differ. 0: they do not. 2: there is nothing to compare."""
    for ours, name, code in (("faulty", "tensor-L1", 1), ("npu", "tensor-L1", 0), ("npu", "structure-mix", 2)):
        given = {
            side: str(find_dump(places(place).folder, name))
            for side, place in (("npu_path", ours), ("bench_path", "cpu"))
        }
        (tmp_path / "compare.json").write_text(json.dumps(given))
        words: list[str | Path] = ["-m", "msprobe", "-f", "pytorch", "compare", "-i", "compare.json", "-o", "out"]
        done = run_python(words, tmp_path, code=code)
        first = next(iter(failing(read_csv(tmp_path / done.stdout.strip()))), None)
        if name == "tensor-L1":
            assert first == (f"{FAULTY_CALLS['L1']}.output.0" if code else None)


@pytest.mark.simulated
def test_run_ut_flags_the_planted_fault_and_nothing_else(places: Places, tmp_path: Path) -> None:
    dump = find_dump(places("npu").folder, "run_ut-L1")
    words = [sys.executable, "-m", "msprobe", "-f", "pytorch", "run_ut", "-api_info", dump, "-o", "ut"]
    done = run_tool(["sim", "--fault", FAULT, "--", *words], tmp_path, code=1)
    assert "FAILED    1 of 12 calls" in done.stdout and f"{FAULTY_CALLS['L1']} " in done.stdout
    (table,) = (tmp_path / "ut").glob("accuracy_checking_result_*.csv")
    results = {row["API name"]: row["Forward Test Success"] for row in read_csv(table)}
    assert [name for name, result in results.items() if result != "True"] == ["Functional.softmax.0"]


@pytest.mark.simulated
def test_a_fault_on_one_rank_is_found_there_and_nowhere_else(places: Places) -> None:
    npu, bench = (places("ranks").folder / device / "tensor-mix" / "step0" for device in ("npu", "cpu"))
    tables = {table.name[15:26]: read_csv(table) for table in compare_distributed(npu, bench, "out", jobs=1)}
    assert list(tables) == ["rank0-rank0", "rank1-rank1"]
    assert failing(tables["rank0-rank0"]) == []
    assert failing(tables["rank1-rank1"])[0] == f"{FAULTY_CALLS['mix']}.output.0"
    alone = read_strictly(find_dump(places("cpu").folder, "tensor-mix"))["data"]
    assert set(read_strictly(bench / "rank0" / "dump.json")["data"]) >= {
        name.replace("Module.", "Module.module.") for name in alone if name.startswith(("Module.", "Functional."))
    }, "the paths are those of the model that was given, here with DDP around it"


def test_a_later_dump_replaces_the_steps_of_its_rank(tmp_path: Path) -> None:
    for op, steps in ((torch.relu, [0, 1]), (torch.abs, [1])):
        debugger = PrecisionDebugger(dump_path=tmp_path / "dump", task="tensor", step=steps)
        for _ in range(2):
            debugger.start(rank_id=0)
            op(torch.ones(2))
            debugger.stop()
            debugger.step()
        forget_debugger()
    for step, op in enumerate(("relu", "abs")):
        folder = tmp_path / "dump" / f"step{step}" / "rank0"
        assert f"Torch.{op}.0.forward" in read_strictly(folder / "dump.json")["data"]
        assert {file.name.split(".")[1] for file in (folder / "dump_tensor_data").iterdir()} == {op}


def narrow(tree: Any) -> None:
    """Round means and norms to float32, in place."""
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        narrow(part)
    if isinstance(tree, dict) and tree.get("Norm") is not None:
        tree |= {name: float(numpy.float32(tree[name])) for name in ("Mean", "Norm")}


@pytest.mark.parametrize(("error", "expected"), [(2e-7, []), (1e-5, ["Functional.embedding.0.forward.output.0"])])
def test_sums_in_float32_may_differ_by_their_rounding(
    places: Places, tmp_path: Path, error: float, expected: list[str]
) -> None:
    """The published package adds in float32, on each device in another order, also what an op has only moved."""
    held = read_strictly(find_dump(places("cpu").folder, "statistics-L1"))
    narrow(held["data"])
    paths = {}
    for side in ("npu_path", "bench_path"):
        folder = tmp_path / side
        folder.mkdir()
        paths[side] = str(folder / "dump.json")
        Path(paths[side]).write_text(json.dumps(held))
        held["data"]["Functional.embedding.0.forward"]["output"][0]["Norm"] *= 1 + error
        narrow(held["data"])
    table = compare(paths, "out")
    assert failing(read_csv(table))[:1] == expected


def test_the_dump_has_the_entries_that_the_published_package_has(places: Places) -> None:
    assert {*read_strictly(find_dump(places("cpu").folder, "tensor-mix"))["data"]} == {*PUBLISHED}

"""Scenario 4 of the guide: several processes under torchrun, a folder for each rank, and compare_distributed of the whole."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.compat import guide_blocks as guide
from tests.compat.reading import read_dump
from tests.compat.scripts import run_on, write_program
from tests.taps.scripts import run_python, run_tool

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
BEGIN = """\
import sys
import torch
import torch.distributed as dist
from small_nets import Trainer
from ptdbg_ascend import *

dist.init_process_group(sys.argv[1])
rank_id = dist.get_rank()
"""
DUMP = """
set_dump_switch("ON")
trainer.find_gradients()
set_dump_switch("OFF")
"""
ON_TWO_DEVICES = f"""{BEGIN}
{guide.MANY_RANKS_PATH}
torch.npu.set_device(f"npu:{{rank_id}}")
trainer = Trainer("conv", f"npu:{{rank_id}}", rank_id)
model = trainer.model
{guide.MANY_RANKS_HOOK}
{DUMP}
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
trainer.update()

{guide.MANY_RANKS_PATH.replace("dump_path/", "dump_gpu/")}
trainer = Trainer("conv", "cpu", rank_id)
model = trainer.model
{guide.MANY_RANKS_HOOK}
{DUMP}
dist.destroy_process_group()
"""
"""First the device under test, then the CPU as the bench. What a rank gets from the others is not dumped."""
WRAPPED = f"""{BEGIN}
from torch.nn.parallel import DistributedDataParallel

{guide.MANY_RANKS_PATH}
trainer = Trainer("conv", "cpu", rank_id)
model = trainer.model = DistributedDataParallel(trainer.model)
register_hook(model, acc_cmp_dump)
{DUMP}
dist.destroy_process_group()
"""
COMPARE = f"from ptdbg_ascend import *\n\n{guide.COMPARE_RANKS}\n"
FAULT = {
    "op": "aten::convolution_overrideable",
    "kind": "swap-rows",
    "dim": 1,
    "module": "*conv2",
    "direction": "forward",
    "rank": 2,
}


def compare_ranks(folder: Path) -> tuple[dict[str, list[dict[str, str]]], str]:
    """The tables by their ranks, and what was said."""
    (folder / "output").mkdir()
    done = run_on("cpu", write_program(folder, COMPARE, "compare.py"))
    tables = {}
    for path in (folder / "output").glob("*.csv"):
        match = re.fullmatch("compare_result_(rank[0-9]+-rank[0-9]+)_[0-9]{14}.csv", path.name)
        assert match, path.name
        with path.open(newline="", encoding="utf-8") as file:
            tables[match[1]] = list(csv.DictReader(file))
    return tables, done.stderr


def folders(dump: Path) -> list[str]:
    return sorted(path.relative_to(dump).as_posix() for path in dump.glob("**/*") if path.suffix != ".npy")


def expected_folders(ranks: int) -> list[str]:
    names = [[f"rank{rank}", f"rank{rank}/myDump", f"rank{rank}/myDump.pkl"] for rank in range(ranks)]
    return sorted(name for rank in names for name in rank)


@pytest.mark.simulated
def test_a_fault_on_one_rank_of_four_is_found_there_and_nowhere_else(tmp_path: Path) -> None:
    write_program(tmp_path, ON_TWO_DEVICES)
    command = [sys.executable, *LAUNCH, "4", "train.py", "cpu:gloo,npu:hccl"]
    run_tool(["sim", "--fault", json.dumps(FAULT), "--", *command], tmp_path)
    for name in ("dump_path", "dump_gpu"):
        assert folders(tmp_path / name / "dump_conv2d_v1.0") == expected_folders(4)
    tables, said = compare_ranks(tmp_path)
    assert sorted(tables) == [f"rank{rank}-rank{rank}" for rank in range(4)]
    for ranks, rows in tables.items():
        failing = [row["NPU Name"] for row in rows if row["Accuracy Reached or Not"] == "No"]
        assert failing[:1] == (["Functional_conv2d_1_forward_output"] if ranks == "rank2-rank2" else []), ranks
        assert {row["Accuracy Reached or Not"] for row in rows} <= {"Yes", "No"}
    assert "1 of 4 ranks" in said and "rank2-rank2" in said


def test_without_a_rank_the_processes_know_theirs(tmp_path: Path) -> None:
    program = write_program(tmp_path, WRAPPED)
    run_python([*LAUNCH, "2", program.name, "gloo"], tmp_path)
    dump = tmp_path / "dump_path" / "dump_conv2d_v1.0"
    assert folders(dump) == expected_folders(2)
    first, second = (read_dump(dump / f"rank{rank}" / "myDump.pkl") for rank in (0, 1))
    assert list(first.lines) == list(second.lines)
    name = "Functional_conv2d_0_forward_input.0"
    assert (first.lines[name].array != second.lines[name].array).any()
    shutil.copytree(tmp_path / "dump_path", tmp_path / "dump_gpu")
    tables, said = compare_ranks(tmp_path)
    assert sorted(tables) == ["rank0-rank0", "rank1-rank1"]
    assert {row["Accuracy Reached or Not"] for rows in tables.values() for row in rows} == {"Yes"}
    assert [row["NPU Name"] for row in tables["rank1-rank1"]] == list(second.lines)
    assert "WARNING" not in said

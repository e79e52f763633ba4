"""The tasks grad_probe and free_benchmark, by their guides: what they write, what they find, and that they change nothing."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import msprobe
from msprobe.pytorch import PrecisionDebugger
from tensorprobe.errors import RunNotFound, SettingsError
from tests.compat.msprobe_net import forget_debugger
from tests.compat.reading import read_csv


@pytest.fixture(autouse=True)
def _one_debugger() -> Iterator[None]:
    yield
    forget_debugger()


def write_config(path: Path, task: str, **section: Any) -> str:
    level = {"level": "L1"} if task == "free_benchmark" else {}
    config = {"task": task, "dump_path": str(path / "dump"), "rank": [], "step": [], task: section, **level}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path / "config.json")


def train_monitored(folder: Path, *, flip_at: int | None = None, **section: Any) -> list[torch.Tensor]:
    """Three steps under `monitor`; the weight's gradients that the optimizer got."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    debugger = PrecisionDebugger(write_config(folder, "grad_probe", **section))
    debugger.monitor(net)
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(5, 4)).square().sum()
        (-loss if step == flip_at else loss).backward()
        weight = net[0].weight.grad
        assert weight is not None
        gradients.append(weight.clone())
        optimizer.step()
    forget_debugger()
    torch.optim.SGD(net.parameters(), 0.1).step()  # nothing is watched any more
    return gradients


@pytest.mark.parametrize(
    ("level", "titles"),
    [
        ("L0", ["param_name", "MD5", "max", "min", "norm", "shape"]),
        ("L1", ["param_name", "max", "min", "norm", "shape"]),
        ("L2", ["param_name", "(-inf, -1]", "(-1, 0.5]", "(0.5, inf)", "=0", "max", "min", "norm", "shape"]),
    ],
)
def test_gradients_are_written_at_each_optimizer_step(level: str, titles: list[str], tmp_path: Path) -> None:
    gradients = train_monitored(tmp_path, grad_level=level, bounds=[-1, 0.5])
    rank = tmp_path / "dump" / "rank0"
    assert sorted(file.name for file in rank.glob("*.csv")) == [f"grad_summary_{step}.csv" for step in range(3)]
    for step, gradient in enumerate(gradients):
        rows = read_csv(rank / f"grad_summary_{step}.csv")
        assert [*rows[0]] == titles and [row["param_name"] for row in rows] == ["0.weight", "0.bias", "2.weight"]
        assert float(rows[0]["max"]) == gradient.max() and float(rows[0]["min"]) == gradient.min()
        assert float(rows[0]["norm"]) == pytest.approx(float(gradient.norm())) and rows[0]["shape"] == "[4, 4]"
        if level == "L2":
            assert float(rows[0]["(-inf, -1]"]) == (gradient <= -1).sum() / 16
            assert float(rows[0]["(-1, 0.5]"]) == ((gradient > -1) & (gradient <= 0.5)).sum() / 16
        signs = rank / f"step{step}" / "0.weight.npy"
        assert signs.exists() == (level != "L0")
        assert level == "L0" or (numpy.load(signs) == (gradient > 0).numpy()).all()


def test_only_the_parameters_and_steps_that_are_named_are_written(tmp_path: Path) -> None:
    train_monitored(tmp_path, param_list=["2.weight"])
    assert [row["param_name"] for row in read_csv(tmp_path / "dump/rank0/grad_summary_1.csv")] == ["2.weight"]
    with pytest.raises(SettingsError, match=r"3\.weight"):
        train_monitored(tmp_path / "other", param_list=["3.weight"])


def test_the_step_where_gradients_turn_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_monitored(tmp_path / "one")
    train_monitored(tmp_path / "two", flip_at=2)
    with caplog.at_level(logging.WARNING):
        tables = msprobe.GradComparator.compare_distributed(
            str(tmp_path / "one/dump"), str(tmp_path / "two/dump"), str(tmp_path / "out")
        )
    assert tables == {0: tmp_path / "out/rank0/similarities.csv"}
    rows = {row["step"]: row for row in read_csv(tables[0])}
    assert [*rows] == ["0.bias", "0.weight", "2.weight", "summary"]
    assert [rows["summary"][step] for step in "012"] == ["1.0", "1.0", "0.0"]
    assert "Step 2, 0.weight: similarity falls from 1.0000 to 0.0000." in caplog.messages


def test_what_one_dump_lacks_never_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_monitored(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two/dump/rank0/step1/0.bias.npy").unlink()
    shutil.rmtree(tmp_path / "two/dump/rank0/step2")
    paths = [str(tmp_path / side / "dump") for side in ("one", "two")]
    table = msprobe.GradComparator.compare_distributed(*paths, str(tmp_path / "out"))[0]
    rows = {row["step"]: row for row in read_csv(table)}
    assert rows["0.bias"]["1"] == "Unmatched" and "2" not in rows["0.bias"]
    assert any("has step 2" in message for message in caplog.messages)
    with pytest.raises(RunNotFound, match="no folder rankN in common"):
        msprobe.GradComparator.compare_distributed(paths[0], str(tmp_path), str(tmp_path / "out"))


def check_calls(folder: Path, dtype: torch.dtype, **section: Any) -> tuple[list[dict[str, str]], torch.Tensor]:
    """The rows for two steps in which `sum` loses its digits to large terms; and a random number drawn after them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.5)).to(dtype)
    debugger = PrecisionDebugger(write_config(folder, "free_benchmark", **section))
    for _ in range(2):
        debugger.start(net)
        made = net(torch.randn(5, 8).to(dtype)).flatten()
        (torch.sum(torch.cat([made * 3e6, -made * 3e6, made])).float() + made.float().exp().mean()).backward()
        debugger.stop()
        debugger.step()
    left = sorted(entry.name for entry in (folder / "dump").iterdir())
    assert left in ([], ["free_benchmark.csv"])
    return read_csv(folder / "dump" / "free_benchmark.csv") if left else [], torch.randn(3)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("bit_noise", torch.float32), ("improve_precision", torch.bfloat16), ("to_cpu", torch.float32)]
)
def test_a_call_that_amplifies_small_errors_is_named(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    rows, _ = check_calls(tmp_path, dtype, pert_mode=mode)
    assert {(row["api_name"], row["stage"]) for row in rows} == (
        {("Torch.sum.0.forward", "forward")} if mode != "to_cpu" else set()
    )
    if rows:
        titles = ["rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index"]
        assert [*rows[0]] == titles and rows[0]["dtype"] == str(dtype) and rows[0]["pert_mode"] == mode
        assert float(rows[0]["max_rel"]) > 0.0002


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_kernel_that_returns_the_same_twice_has_no_row(
    stage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows, drawn = check_calls(tmp_path / "checked", torch.float32, pert_mode="no_change", fuzz_stage=stage)
    assert rows == []
    said = [message for message in caplog.messages if "0 outputs beyond the limit" in message]
    assert len(said) == 2 and "no_change: 0 calls" not in said[0]
    assert any("1 call not checked: it draws random numbers" in message for message in caplog.messages)
    forget_debugger()
    _, again = check_calls(tmp_path / "again", torch.float32, list=["no such call"])
    assert torch.equal(drawn, again)  # replays draw nothing from the program's generator


def test_what_is_not_part_of_these_tasks_is_refused(tmp_path: Path) -> None:
    for section in ({"handler_type": "fix"}, {"pert_mode": "change_value"}, {"if_preheat": True}):
        with pytest.raises(SettingsError, match=next(iter(section))):
            PrecisionDebugger(write_config(tmp_path, "free_benchmark", **section))
    with pytest.raises(SettingsError, match="ascend"):
        PrecisionDebugger(write_config(tmp_path, "grad_probe", bounds=[1, 0]))

"""The online compare on a device: a planted fault is named where it first shows, right trainings raise no alarm and stay as they are."""

from __future__ import annotations

import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tensorprobe
from bench.sim import models
from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.model.online import OnlineResult, OnlineRow
from tensorprobe.sim.known_faults import CatalogFault
from tensorprobe.watches.online.watch import OnlineWatch

NAMED = {
    "softmax-tail": "blocks.0.attn",
    "softmax-gradient": "blocks.1.attn",
    "linear-bias-gradient": "blocks.1.up",
    "layer-norm-nan-third-step": "blocks.1.norm1",
    "adam-momentum": "",
}
"""Fault → the module in which it first shows."""


def entry(name: str) -> CatalogFault:
    return next(one for one in sim.catalog() if one.name == name)


def train(model: str, steps: int) -> list[float]:
    work = workload(model, "npu")
    return [work.step().item() for _ in range(steps)]


@cache
def right_losses(model: str, steps: int) -> list[float]:
    return train(model, steps)


def watch_training(model: str, steps: int, **settings: Any) -> tuple[list[float], OnlineWatch]:
    work = workload(model, "npu")
    with tensorprobe.online(work.model, **{"on_fail": "report", **settings}) as watch:
        losses = [work.step().item() for _ in range(steps)]
    assert_accounted_for(watch.result)
    return losses, watch


def assert_accounted_for(result: OnlineResult) -> None:
    skipped = sum(sum(ops.values()) for ops in result.skipped.values())
    assert result.seen == result.compared + skipped + result.unsampled + result.filtered + result.broken
    assert result.broken == 0, result.first_error


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_is_named_at_its_first_occurrence(npu: str, name: str) -> None:
    fault = entry(name)
    assert fault.truth is not None
    with sim.installed([fault.fault]):
        losses, watch = watch_training(fault.model, fault.steps)
    with sim.installed([fault.fault]):
        assert repr(losses) == repr(train(fault.model, fault.steps))  # one of them is not a number
    first = watch.failures[0]
    assert (first.api, first.step) == (fault.truth.api, fault.truth.step)
    assert first.call.startswith(f"Aten.{fault.truth.aten.removeprefix('aten::')}.")
    assert {row.op for row in watch.failures} == {
        first.op
    }  # what comes after has right inputs of its own, and is right
    assert first.module == NAMED[name]
    assert first.call.endswith(".backward" if "gradient" in name else ".forward")
    assert first.stack[0].startswith(f'File "{models.__file__}", line ')


@pytest.mark.parametrize("reference", ["cpu", "cpu-fp64"])
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_a_right_training_raises_no_alarm_and_is_not_changed(npu: str, model: str, reference: str) -> None:
    losses, watch = watch_training(model, 2, reference=reference)
    assert losses == right_losses(model, 2)
    assert [(row.call, row.judged_by, row.measured, row.allowed) for row in watch.failures] == []
    assert watch.report.startswith("AGREES: ")
    assert watch.result.compared > watch.result.seen / 3


class Kept(msgspec.Struct):
    losses: list[float]
    rows: list[OnlineRow]
    folder: Path


@pytest.fixture(scope="module")
def kept(npu: str, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """One step with a fault, judged by a worker, the failing calls on disk."""
    folder = tmp_path_factory.mktemp("online")
    with sim.installed([entry("softmax-tail").fault]):
        losses, watch = watch_training("gpt", 1, workers=1, out=folder, on_fail="save")
    return Kept(losses, watch.failures, folder)


def without_place(rows: list[OnlineRow]) -> list[OnlineRow]:
    return [msgspec.structs.replace(row, stack=row.stack[:1], saved="") for row in rows]


def test_a_worker_finds_the_same_rows(kept: Kept) -> None:
    with sim.installed([entry("softmax-tail").fault]):
        losses, watch = watch_training("gpt", 1)
    assert losses == kept.losses
    assert without_place(watch.failures) == without_place(kept.rows)


def replay(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    script = Path(kept.rows[0].saved) / "replay.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code, capsys.readouterr().out


def test_a_saved_call_runs_again_on_the_device_it_was_made_on(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = f"{kept.rows[0].max_abs:.4g}"
    with sim.installed([entry("softmax-tail").fault]):
        code, said = replay(kept, monkeypatch, capsys)
    assert code == 1 and said.count(error) == 2 and "FAILS on npu" in said  # then, and now
    code, said = replay(kept, monkeypatch, capsys)  # the fault is gone: only rounding is left
    assert code == 0 and said.count(error) == 1 and "within the limits on npu" in said


def test_healing_lets_the_training_recover(npu: str) -> None:
    right = right_losses("gpt", 2)
    with sim.installed([entry("softmax-tail").fault]):
        losses, watch = watch_training("gpt", 2, heal=True)
        assert train("gpt", 2) != pytest.approx(right, rel=1e-5)
    assert losses == pytest.approx(right, rel=1e-5)
    assert watch.result.healed == watch.result.failed > 0


def test_a_chain_tells_what_was_inherited(npu: str) -> None:
    with sim.installed([entry("softmax-tail").fault]):
        _, watch = watch_training("gpt", 1, chain=True)
    first, second = watch.failures[:2]
    assert first.inherited is not None and first.accumulated is not None
    assert first.inherited < 1e-5 < 1e-3 < first.accumulated
    assert second.inherited is not None and second.inherited > 1e-4  # its inputs are off before it adds its own
    assert f"{first.call} in {first.api}" in watch.report


def test_attention_without_dropout_is_no_random_op(npu: str) -> None:
    q = torch.randn(1, 2, 4, 8).npu()
    with tensorprobe.online(on_fail="report") as watch:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert [op for op in watch.result.skipped.get("random", {}) if "attention" in op] == []
    assert watch.result.compared > 0 and watch.result.failed == 0

"""Faults of the catalog are named by a comparison, exactly where the truth says; right trainings agree.

Knows of the runs only what `tensorprobe.compare` tells. All faults and policies: bench.compare.detection.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tensorprobe
from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.sim.known_faults import CatalogFault

Runs = Callable[..., Path]

FAULTS = """softmax-tail softmax-stale attention-fused-bf16 linear-scale head-one-element matmul-transposed-gradient
    linear-bias-gradient bf16-matmul-accumulate layer-norm-saved-scale layer-norm-nan-third-step batch-norm-gradient
    copy-one-element scatter-gradient topk-values-swapped conv-weight-gradient cross-entropy-gradient-nan adam-root-bf16
    adam-update-second-step sgd-momentum error-in-forward error-in-backward""".split()


def entry(name: str) -> CatalogFault:
    return next(each for each in sim.catalog() if each.name == name)


def record(
    folder: Path, model: str, steps: int, *, device: str = "npu", mode: str = "tensor", level: str = "api"
) -> Path:
    """Train and capture; an error of the device ends the training early, as it would for a user."""
    work = workload(model, device)
    with tensorprobe.capture(folder, model=work.model, level=level, mode=mode) as probe:
        try:
            for _ in range(steps):
                work.step()
                probe.step()
        except RuntimeError as error:
            if "simulated device error" not in str(error):
                raise
    return folder


@pytest.fixture(scope="module")
def right(npu: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Right runs, each recorded once."""
    made: dict[tuple[object, ...], Path] = {}

    def make(
        model: str, steps: int, *, again: bool = False, device: str = "npu", mode: str = "tensor", level: str = "api"
    ) -> Path:
        key = (model, steps, again, device, mode, level)
        if key not in made:
            folder = tmp_path_factory.mktemp("right") / "run"
            made[key] = record(folder, model, steps, device=device, mode=mode, level=level)
        return made[key]

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_the_divergence_is_the_planted_call(right: Runs, name: str, tmp_path: Path) -> None:
    fault = entry(name)
    assert fault.truth is not None
    baseline = right(fault.model, fault.steps)
    with sim.installed([fault.fault]):
        candidate = record(tmp_path / "wrong", fault.model, fault.steps)
    result = tensorprobe.compare(baseline, candidate)
    found = result.divergence
    assert found is not None and result.exit_code == 1
    assert (found.call, found.step, found.rank) == (fault.truth.api, fault.truth.step, 0)
    if name.startswith("error-"):
        assert found.status == "structural" and found.finding is not None
    else:
        assert found.status == "introduced" and found.inputs in ("identical", "agree")
    assert found.source is not None and found.source.file.endswith(".py") and found.source.line > 0
    assert found.call in str(result).splitlines()[0]


@pytest.mark.parametrize("model", ["gpt", "cnn", "gpt-bf16"])
def test_the_same_training_twice_agrees_in_every_bit(right: Runs, model: str) -> None:
    result = tensorprobe.compare(right(model, 3), right(model, 3, again=True), policy="bitwise")
    assert result.agrees and result.exit_code == 0
    assert result.summary.first_difference is None
    assert result.summary.statuses["agrees"] == result.summary.buckets.paired > 0


@pytest.mark.parametrize("model", ["gpt", "cnn", "gpt-bf16"])
def test_the_same_training_on_another_device_agrees(right: Runs, model: str) -> None:
    result = tensorprobe.compare(right(model, 3, device="cpu"), right(model, 3))
    assert result.agrees, str(result)
    assert result.summary.steps == [0, 1, 2]
    assert not result.summary.externals
    # Autocast of the simulated device keeps softmax narrow where that of the CPU widens it.
    assert {finding.kind for finding in result.findings} <= ({"dtype"} if model == "gpt-bf16" else set())
    assert result.summary.buckets.only_baseline == result.summary.buckets.only_candidate == 0


def test_a_scale_is_found_by_statistics_alone_and_said_to_be_weaker(right: Runs, tmp_path: Path) -> None:
    fault = entry("mse-scale")
    assert fault.truth is not None
    baseline = right(fault.model, fault.steps, mode="summary")
    with sim.installed([fault.fault]):
        candidate = record(tmp_path / "wrong", fault.model, fault.steps, mode="summary")
    result = tensorprobe.compare(baseline, candidate)
    assert result.divergence is not None
    assert (result.divergence.call, result.divergence.step) == (fault.truth.api, fault.truth.step)
    assert result.summary.bases["values"] == 0 < result.summary.bases["statistics"]
    assert any(note.startswith("weaker:") for note in result.summary.notes)
    assert "weaker" in str(result)


@pytest.mark.parametrize("level", ["module", "mix", "aten"])
def test_other_levels_name_a_call_of_the_same_layer(right: Runs, level: str, tmp_path: Path) -> None:
    """The API level is where the truth is known; the others must not point elsewhere."""
    fault = entry("gelu-truncated")
    baseline = right(fault.model, fault.steps, level=level)
    with sim.installed([fault.fault]):
        candidate = record(tmp_path / "wrong", fault.model, fault.steps, level=level)
    found = tensorprobe.compare(baseline, candidate).divergence
    assert found is not None and found.status == "introduced"
    assert found.module.startswith("blocks.0") and found.direction == "forward"
    expected = {"mix": "Functional.gelu.0.forward", "aten": "Aten.gelu.default.0.forward"}
    assert found.call == expected.get(level, found.call)


def test_one_thread_and_two_give_the_same_answer(right: Runs, tmp_path: Path) -> None:
    fault = entry("linear-scale")
    with sim.installed([fault.fault]):
        candidate = record(tmp_path / "wrong", fault.model, fault.steps)
    baseline = right(fault.model, fault.steps)
    one, two = (tensorprobe.compare(baseline, candidate, threads=threads) for threads in (1, 2))
    assert repr(list(one.rows)) == repr(list(two.rows))  # repr: NaN is not equal to itself
    assert repr(one.divergence) == repr(two.divergence)

"""Every fault of the catalog makes the run different exactly at the stated place, and nowhere earlier, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.sim.known_faults import CatalogFault
from tests.sim import tracing

HERE = Path(__file__).parent
CATALOG = sim.catalog()
ALONE = [entry for entry in CATALOG if entry.model != "parallel"]
TOGETHER = [entry for entry in CATALOG if entry.model == "parallel"]


@cache
def right_run(model: str, steps: int) -> tuple[tracing.Tracer, list[float]]:
    return tracing.trace(workload(model, "npu"), steps)


def test_there_are_enough_and_all_are_sound() -> None:
    assert len(CATALOG) >= 40
    assert len({entry.name for entry in CATALOG}) == len(CATALOG)
    for entry in CATALOG:
        assert sim.make_fault(**entry.fault.as_dict()) == entry.fault
        assert entry.about.endswith(".")


@pytest.mark.parametrize("entry", ALONE, ids=lambda entry: entry.name)
def test_the_first_difference_is_where_the_truth_says(npu: str, entry: CatalogFault) -> None:
    right, _ = right_run(entry.model, entry.steps)
    with sim.installed([entry.fault]) as handles:
        wrong, _ = tracing.trace(workload(entry.model, npu), entry.steps)
    assert handles[0].fired
    truth = entry.truth
    assert truth is not None
    op, wrong_op = tracing.first_difference(right.ops, wrong.ops)
    assert (op.aten, op.number, op.step) == (truth.aten, truth.number, truth.step)
    call, wrong_call = tracing.first_difference(right.calls, wrong.calls)
    assert (call.api, call.step) == (truth.api, truth.step)
    assert bool(wrong_op.error) == bool(wrong_call.error) == truth.raises
    # The loss itself may round to the same number: that later calls see the fault is what every processor shows.
    spread = sum(a.digest != b.digest for a, b in zip(right.calls, wrong.calls, strict=False))
    assert spread > 1 or truth.raises or call.api.endswith("backward") or "foreach" in call.api


def test_nondeterminism_differs_between_two_runs(npu: str) -> None:
    entry = next(entry for entry in CATALOG if entry.name == "softmax-nondeterministic")
    runs = []
    for _ in range(2):
        with sim.installed([entry.fault]):
            runs.append(tracing.trace(workload(entry.model, npu), 1)[0])
    op, _ = tracing.first_difference(runs[0].ops, runs[1].ops)
    assert op.aten == "aten::_softmax"


def test_device_error_in_backward_reaches_the_caller(npu: str) -> None:
    entry = next(entry for entry in CATALOG if entry.name == "error-in-backward")
    with (
        sim.installed([entry.fault]),
        pytest.raises(RuntimeError, match=r"simulated device error in aten::gelu_backward: device-side failure"),
    ):
        workload(entry.model, npu).step()
    assert workload(entry.model, npu).step().isfinite(), "the device works again when the fault is gone"


@pytest.mark.usefixtures("warm_processes")
def test_collective_faults_and_data_parallel_training(tmp_path: Path) -> None:
    """Two processes over the backend `hccl` run every collective fault of the catalog, and DistributedDataParallel."""
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "parallel_worker.py"), str(tmp_path / "store"), str(tmp_path / f"{rank}.json")],
            env={**environment, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for entry in TOGETHER:
        assert entry.truth is not None
        expected = [entry.truth.aten, entry.truth.number, entry.truth.api]
        affected = [answer["places"][entry.name] for answer in answers if answer["places"][entry.name]]
        assert affected and all(place == expected for place in affected), entry.name
        if entry.fault.kind == "drop-contribution":
            assert len(affected) == 2, "the sum is wrong on every rank"
    for answer in answers:
        assert answer["ddp_losses"] == pytest.approx(answer["ddp_cpu_losses"], rel=1e-5)
        assert answer["gathered_objects"] == [{"rank": 0}, {"rank": 1}]
    assert answers[0]["ddp_weight"] == answers[1]["ddp_weight"]

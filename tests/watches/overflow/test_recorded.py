"""The question asked of recorded runs: the same answer as a watch gives, from statistics or values, of one rank or many."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.overflow import register
from tensorprobe.errors import NoData, NotFound, RunDamaged, RunNotFound, SettingsError
from tensorprobe.model import Call, Slot
from tensorprobe.watches.overflow import find_overflow
from tensorprobe.watches.overflow.replaying import replay_verdict
from tests import warm
from tests.builders.runs import call, write
from tests.watches.overflow.plants import PLANTS, linear, numbers

NAMES = """mask_by_full_and_triu mask_by_log_of_zero overflow_beside_a_mask row_masked_everywhere log_of_zero in_the_optimizer
    gradient_of_a_root_at_zero true_nan_behind_a_mask nan_in_data memory_that_is_being_filled""".split()


@pytest.mark.parametrize("name", NAMES)
def test_a_record_gives_the_same_answer(name: str, tmp_path: Path) -> None:
    program, expected = PLANTS[name]
    with tensorprobe.capture(tmp_path / "run", in_process=True):
        program()
    result = find_overflow(tmp_path / "run")
    if isinstance(expected, tuple):
        assert [(first.call, first.kind) for first in result.first_nonfinite] == [expected]
    else:
        assert result.first_nonfinite == []
        assert [f"came in: {each.what}" for each in result.arrivals] == ([expected] if expected else [])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training as values, as statistics, and as structure."""
    folder = tmp_path_factory.mktemp("runs")
    for mode in ("tensor", "summary", "structure"):
        model = nn.Sequential(linear(4, 4), nn.ReLU(), linear(4, 4))
        with tensorprobe.capture(folder / mode, model=model, mode=mode, stacks=True, in_process=True) as probe:
            for step in range(2):
                (model(numbers(3, 4)) * 100.0 ** (5 * step)).exp().log().mean().backward()
                probe.step()
    return folder


def test_values_and_statistics_name_the_same_call(runs: Path) -> None:
    by_values, by_statistics = find_overflow(runs / "tensor"), find_overflow(runs / "summary")
    for result in (by_values, by_statistics):
        (first,) = result.first_nonfinite
        assert (first.call, first.step, first.outputs[0].inf > 0) == ("Tensor.exp.0.forward", 1, True)
        assert first.inputs[0].producer == "Tensor.mul.0.forward"
        assert first.frames[0].file == __file__
        assert first.before[-1] == "Tensor.mul.0.forward"
    assert (by_values.first_nonfinite[0].verdict, by_statistics.first_nonfinite[0].verdict) == ("normal", "unknown")
    assert "mode='tensor'" in by_statistics.first_nonfinite[0].reason
    assert by_values.first_nonfinite[0].outputs[0].first
    assert find_overflow(runs / "tensor", replay=False).first_nonfinite[0].verdict == "unknown"
    assert find_overflow(runs / "tensor", steps=[0]).exit_code == 0
    assert find_overflow(runs / "tensor", allow="Tensor.exp").first_nonfinite[0].op == "Tensor.log"
    assert find_overflow(runs / "summary", near=1e36).summary.near


def test_what_cannot_be_asked_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(NoData, match="mode='summary'"):
        find_overflow(runs / "structure")
    with pytest.raises(NotFound, match="no step 7"):
        find_overflow(runs / "tensor", steps=7)
    with pytest.raises(RunNotFound, match="overflow watch"):
        find_overflow(tmp_path)
    with pytest.raises(SettingsError, match="near"):
        find_overflow(runs / "tensor", near=0.1)
    (tmp_path / "overflow.rank0.json").write_text("{")
    with pytest.raises(RunDamaged, match=r"overflow\.rank0\.json"):
        find_overflow(tmp_path)


def test_the_command_prints_and_exits(runs: Path) -> None:
    import typer

    app = typer.Typer()
    register(app)
    done = CliRunner().invoke(app, [str(runs / "tensor")])
    assert (done.exit_code, done.output.splitlines()[0]) == (
        1,
        "FIRST INF in Tensor.exp.0.forward, step 1, rank 0",
    )
    done = CliRunner().invoke(app, [str(runs / "summary"), "--steps", "0", "--json"])
    assert (done.exit_code, json.loads(done.output)["first_nonfinite"]) == (0, [])


def test_asking_a_run_of_statistics_imports_no_torch(runs: Path) -> None:
    code = f"from tensorprobe.watches.overflow import find_overflow; import sys; find_overflow({str(runs / 'summary')!r}); "
    done = subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0


EXP = Call(
    name="Torch.exp.0.forward",
    args=[{"slot": "input.0"}],
    slots=(
        Slot(name="input.0", dtype="float16", shape=(2,), grad=True),
        Slot(name="output.0", dtype="float16", shape=(2,)),
    ),
)


def judged(inputs: float, found: float, gradient: float | None = None) -> tuple[str, str]:
    tensors = [torch.tensor([value, 1.0], dtype=torch.float16) for value in (inputs, found)]
    gradients = None if gradient is None else {"output.0": torch.tensor([gradient, 1.0], dtype=torch.float16)}
    verdict, reason, _ = replay_verdict(EXP, {"input.0": tensors[0]}, {"output.0": tensors[1]}, gradients=gradients)
    return verdict, reason


def test_normal_is_what_the_cpu_overflows_in_too() -> None:
    assert judged(12.0, math.inf) == (
        "normal",
        "output.0 reaches 1.628e+05 in float64, beyond the float16 limit of 65504: not a device fault",
    )
    assert judged(2.0, math.inf) == ("abnormal", "the CPU returns finite numbers in float16, up to 7.391 in output.0")
    assert judged(2.0, math.nan)[0] == "abnormal"
    assert judged(math.inf, math.inf)[1] == "float64 gives inf in output.0 too: not a device fault"
    assert judged(9.0, math.inf, gradient=60.0)[0] == "normal"
    assert judged(1.0, math.inf, gradient=2.0)[0] == "abnormal"
    assert judged(2.0, 7.0) == ("normal", "the result is finite")


def test_what_cannot_be_run_alone_has_no_verdict() -> None:
    for name in ("Torch.no_such_function.0.forward", "Torch.exp.0.forward"):
        call = Call(name=name, args=[{"slot": "input.0"}, {"type": "object", "value": "x"}])
        verdict, reason, overflows = replay_verdict(call, {"input.0": torch.ones(2)})
        assert (verdict, overflows) == ("unknown", None)
        assert reason.startswith("it cannot be run alone: ")


RANKS = """
import sys, torch, torch.distributed as dist, torch.nn as nn
from pathlib import Path
import tensorprobe
from tensorprobe.watches.overflow import OverflowWatch
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
def train():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    x = torch.ones(2, 4)
    if rank == 1:
        x = x.mul(100.0).exp()
    total = x.sum()
    dist.all_reduce(total)
    (model(torch.ones(2, 4)).sum() * total).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
with OverflowWatch(out=folder / "watch"):
    train()
with tensorprobe.capture(folder / "run", mode="summary", in_process=True):
    train()
dist.destroy_process_group()
"""


def test_one_rank_of_two_is_blamed(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", RANKS, str(tmp_path), str(rank)] for rank in (0, 1)]
    processes = [warm.Popen(command) for command in commands]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for folder in ("watch", "run"):
        result = find_overflow(tmp_path / folder)
        (first,) = result.first_nonfinite
        assert (first.call, first.rank) == ("Tensor.exp.0.forward", 1)
        assert any("(rank 0)" in name for name in first.spread)
        assert (result.arrivals, result.summary.ranks) == ([], [0, 1])


@pytest.mark.usefixtures("warm_processes")
def test_a_replay_that_dies_does_not_take_the_command_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checks.deadly_ops import set_environment

    set_environment(monkeypatch).close()
    x, infinite = np.full(3, 100, "float32"), np.full(3, np.inf, "float32")
    names = ("Ops.deadly.crash.0.forward", "Ops.deadly.leave.0.forward", "Torch.exp.0.forward")
    calls = [call(name, inputs=[x], outputs=[infinite], args=[{"slot": "input.0"}]) for name in names]
    found = find_overflow(write(tmp_path / "run", calls), allow="nothing")
    reasons = {first.call: first.reason for first in found.first_nonfinite}
    assert reasons["Ops.deadly.crash.0.forward"] == "its replay was killed by signal 11 (SIGSEGV)"
    assert reasons["Ops.deadly.leave.0.forward"] == "its replay ended with exit code 7: nothing to be done"
    assert "float64" in reasons["Torch.exp.0.forward"]

"""Several processes under torchrun: a folder for each rank, names without wrappers, collectives with their results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.record import Run
from tests.taps.scripts import run_python, run_tool, write_script
from tests.taps.tiny import names, slot, the_call, value

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

COLLECTIVES = """
    import sys
    import torch
    import torch.distributed as dist
    import tensorprobe

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tensorprobe.capture("run", level=sys.argv[1]) as probe:
        own = torch.full((3,), rank + 1.0)
        dist.all_reduce(own)
        waited = torch.full((4,), rank + 1.0)
        handle = dist.all_reduce(waited, async_op=True)
        handle.wait()
        parts = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        word = torch.full((2,), float(rank))
        dist.broadcast(word, src=1)
        if rank == 0:
            dist.send(torch.full((2,), 5.0), dst=1)
        else:
            dist.recv(torch.zeros(2), src=0)
        dist.barrier()
    with tensorprobe.capture("mesh", level=sys.argv[1]):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        sharded = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        total = torch.sin(sharded).redistribute(mesh, [Replicate()]).to_local()
        assert torch.equal(total, torch.sin(torch.arange(8.0).view(4, 2)))
    print(rank, own.tolist(), waited.tolist(), probe.coverage.failed)
    dist.destroy_process_group()
"""


TRAINING = """
    import argparse, sys
    sys.path.insert(0, sys.argv[1])
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import tensorprobe
    import train_ddp

    def train(sharded, out=None, **settings):
        torch.manual_seed(0)
        model = train_ddp.distribute(train_ddp.Regressor(8, 1), sharded=sharded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        probe = None if out is None else tensorprobe.Probe(out, model=model, level="mix", **settings).start()
        losses = []
        for step in range(2):
            loss = F.mse_loss(model(torch.ones(2, train_ddp.FEATURES) + dist.get_rank()), torch.ones(2, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if probe is not None:
                probe.step()
        if probe is not None:
            probe.stop()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return losses, [p.tolist() for p in whole]

    dist.init_process_group("gloo")
    for sharded, out in ((False, "ddp"), (True, "fsdp")):
        assert train(sharded) == train(sharded, out), out
    train(False, "second", ranks=[1])
    dist.destroy_process_group()
    sys.stdout.write("the same\\n")
"""


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    done = run_python([*LAUNCH, write_script(folder, COLLECTIVES), "api"], folder)
    assert sorted(done.stdout.splitlines()) == [f"{rank} {[3.0] * 3} {[3.0] * 4} 0" for rank in (0, 1)]
    assert "CaptureIncomplete" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = run_python([*LAUNCH, write_script(folder, TRAINING), EXAMPLE.parent], folder)
    assert done.stdout.splitlines() == ["the same"] * 2
    assert "CaptureIncomplete" not in done.stderr
    return folder


@pytest.mark.needs_torch("2.13", "an older torch does not show every collective to a mode")
def test_collectives_are_recorded_with_their_results(collectives: Path) -> None:
    run = tensorprobe.open_run(collectives / "run")
    assert run.closed
    assert run.ranks == [0, 1]
    assert run.manifest.world_size == 2
    for rank in (0, 1):
        reduced, waited = (the_call(run, f"Distributed.all_reduce.{number}.forward", rank=rank) for number in (0, 1))
        assert value(reduced, "input.0").tolist() == [rank + 1.0] * 3
        assert value(reduced, "output.0").tolist() == [3.0] * 3
        assert value(waited, "input.0").tolist() == [rank + 1.0] * 4
        assert value(waited, "output.0").tolist() == [3.0] * 4
        gathered = the_call(run, "Distributed.all_gather.0.forward", rank=rank)
        assert slot(gathered, "input.0.0").skipped == "only written to by the call"
        assert [value(gathered, f"output.0.{part}").tolist() for part in (0, 1)] == [[0.0, 0.0], [1.0, 1.0]]
        broadcast = the_call(run, "Distributed.broadcast.0.forward", rank=rank)
        assert value(broadcast, "output.0").tolist() == [1.0, 1.0]
    received = the_call(run, "Distributed.recv.0.forward", rank=1)
    assert value(received, "output.0").tolist() == [5.0, 5.0]
    assert "Distributed.send.0.forward" in names(run, rank=0)


def assert_local_parts(run: Run) -> None:
    whole = torch.arange(8.0).view(4, 2)
    for rank in (0, 1):
        sines = [call for call in run.calls(rank=rank) if "sin" in call.op]
        assert torch.equal(sines[0].inputs[0].tensor(), whole[2 * rank : 2 * rank + 2])


def test_sharded_tensors_are_recorded_by_their_local_part(collectives: Path) -> None:
    assert_local_parts(tensorprobe.open_run(collectives / "mesh"))


def test_sharded_tensors_are_recorded_by_their_local_part_at_aten_level(tmp_path: Path) -> None:
    done = run_python([*LAUNCH, write_script(tmp_path, COLLECTIVES), "aten"], tmp_path)
    assert "CaptureIncomplete" not in done.stderr
    assert_local_parts(tensorprobe.open_run(tmp_path / "mesh"))


@pytest.mark.parametrize("variant", ["ddp", "fsdp"])
def test_wrapped_models_have_the_names_of_plain_ones(variant: str, trained: Path) -> None:
    run = tensorprobe.open_run(trained / variant)
    assert run.closed
    assert run.ranks == [0, 1]
    assert run.steps[:2] == [0, 1]
    for rank in (0, 1):
        modules = {call.name for call in run.calls(step=0, rank=rank) if call.level == "module"}
        forward = {name for name in modules if ".forward." in name}
        assert forward == {
            "Module.Regressor.forward.0",
            "Module.stem.Linear.forward.0",
            "Module.layers.0.Layer.forward.0",
            "Module.layers.0.norm.LayerNorm.forward.0",
            "Module.layers.0.linear.Linear.forward.0",
            "Module.head.Linear.forward.0",
        }
        assert "Module.layers.0.linear.Linear.backward.0" in modules
        assert run.coverage[rank].failed == 0
        paths = {call.module for call in run.calls(step=0, rank=rank)}
        assert not [path for path in paths if "module" in path or "_fsdp" in path]


def test_only_the_asked_rank_is_recorded(trained: Path) -> None:
    run = tensorprobe.open_run(trained / "second")
    assert run.ranks == [1]
    assert names(run, step=0, rank=1)


def test_command_records_what_torchrun_starts(tmp_path: Path) -> None:
    options = ["--steps", "1", "--layers", "1", "--width", "8"]
    command = ["capture", "-o", "run", "--mode", "summary", "--", sys.executable, *LAUNCH, EXAMPLE, *options]
    done = run_tool(command, tmp_path)
    assert len(re.findall(r"rank \d step 0", done.stdout)) == 2
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.closed
    assert run.ranks == [0, 1]
    for rank in (0, 1):
        assert "Functional.linear.0.backward" in names(run, step=0, rank=rank)

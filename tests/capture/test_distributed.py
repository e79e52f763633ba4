"""Several processes under torchrun: a folder for each rank, names without wrappers, collectives with their results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tensorprobe
from capture.scripts import run_python, run_tool, write_script
from capture.tiny import names, slot, the_call, value

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


def test_collectives_are_recorded_with_their_results(tmp_path: Path) -> None:
    script = write_script(tmp_path, COLLECTIVES)
    done = run_python([*LAUNCH, script, "api"], tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"{rank} {[3.0] * 3} {[3.0] * 4} 0" for rank in (0, 1)]
    assert "CaptureIncomplete" not in done.stderr
    run = tensorprobe.open_run(tmp_path / "run")
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


def test_sharded_tensors_are_recorded_by_their_local_part(tmp_path: Path) -> None:
    script = write_script(tmp_path, COLLECTIVES)
    for level in ("api", "aten"):
        folder = tmp_path / level
        folder.mkdir()
        run_python([*LAUNCH, script, level], folder)
        run = tensorprobe.open_run(folder / "mesh")
        for rank in (0, 1):
            whole = torch.arange(8.0).view(4, 2)
            sines = [call for call in run.calls(rank=rank) if "sin" in call.op]
            assert sines
            found = sines[0].inputs[0]
            assert torch.equal(found.tensor(), whole[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("variant", ["ddp", "fsdp"])
def test_wrapped_models_have_the_names_of_plain_ones(variant: str, tmp_path: Path) -> None:
    options = ["--steps", "2", "--layers", "1", "--width", "8", *(["--fsdp"] if variant == "fsdp" else [])]
    plain = run_python([*LAUNCH, EXAMPLE, *options], tmp_path)
    done = run_tool(["capture", "-o", "run", "--level", "mix", "--", "python", *LAUNCH, EXAMPLE, *options], tmp_path)
    losses = [sorted(re.findall(r"rank \d step \d loss \S+", run.stdout)) for run in (plain, done)]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    run = tensorprobe.open_run(tmp_path / "run")
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


def test_only_the_asked_rank_is_recorded(tmp_path: Path) -> None:
    options = ["--steps", "1", "--layers", "1", "--width", "8"]
    done = run_tool(["capture", "-o", "run", "--ranks", "1", "--", "python", *LAUNCH, EXAMPLE, *options], tmp_path)
    assert len(re.findall(r"rank \d step 0", done.stdout)) == 2
    run = tensorprobe.open_run(tmp_path / "run")
    assert run.ranks == [1]
    assert names(run, step=0, rank=1)

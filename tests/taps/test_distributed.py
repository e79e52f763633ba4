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
    sys.stdout.write(f"{rank} {own.tolist()} {waited.tolist()} {probe.coverage.failed}\\n")
    dist.destroy_process_group()
"""

MESH = """
    import sys
    import torch
    import torch.distributed as dist
    import tensorprobe
    try:
        from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    with mesh, tensorprobe.capture("mesh", level=sys.argv[1]) as probe:
        sharded = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        total = torch.sin(sharded).redistribute(mesh, [Replicate()]).to_local()
        assert torch.equal(total, torch.sin(torch.arange(8.0).view(4, 2)))
    assert probe.coverage.failed == 0
    dist.destroy_process_group()
"""

UNWAITED = """
    import sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import tensorprobe

    dist.init_process_group("gloo")
    group, ending = dist.distributed_c10d._get_default_group(), Path("ending")
    while dist.get_rank() and not ending.exists():
        pass
    with tensorprobe.capture("run"):
        group.allreduce([torch.ones(2)])
    del group
    ending.touch()
    dist.destroy_process_group()
    sys.stdout.write("ended\\n")
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
    out = sys.argv[2]
    assert train(out == "fsdp") == train(out == "fsdp", out), out
    if out == "ddp":
        train(False, "second", ranks=[1])
    dist.destroy_process_group()
    sys.stdout.write("the same\\n")
"""


def train(variant: str, folder: Path) -> Run:
    done = run_python([*LAUNCH, write_script(folder, TRAINING), EXAMPLE.parent, variant], folder)
    assert done.stdout.splitlines() == ["the same"] * 2
    assert "CaptureIncomplete" not in done.stderr
    return tensorprobe.open_run(folder / variant)


def test_collectives_are_recorded_with_their_results(tmp_path: Path) -> None:
    done = run_python([*LAUNCH, write_script(tmp_path, COLLECTIVES), "api"], tmp_path)
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
        assert (reduced.model.kwargs or {})["op"] == {"type": "torch.distributed.ReduceOp", "value": "SUM"}
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


def test_a_group_ends_while_one_of_its_threads_still_works(tmp_path: Path) -> None:
    done = run_python([*LAUNCH, write_script(tmp_path, UNWAITED)], tmp_path)
    assert done.stdout.splitlines() == ["ended"] * 2


def assert_local_parts(run: Run) -> None:
    whole = torch.arange(8.0).view(4, 2)
    for rank in (0, 1):
        sines = [call for call in run.calls(rank=rank) if "sin" in call.op]
        assert torch.equal(sines[0].inputs[0].tensor(), whole[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("level", ["api", "aten"])
def test_sharded_tensors_are_recorded_by_their_local_part(level: str, tmp_path: Path) -> None:
    done = run_python([*LAUNCH, write_script(tmp_path, MESH), level], tmp_path)
    assert "CaptureIncomplete" not in done.stderr
    run = tensorprobe.open_run(tmp_path / "mesh")
    assert_local_parts(run)
    assert {rank: part.coordinates for rank, part in run.parts.items()} == {0: {"dp": 0}, 1: {"dp": 1}}


@pytest.mark.parametrize(
    "variant", ["ddp", pytest.param("fsdp", marks=pytest.mark.needs_torch("2.8", "fully_shard on the CPU"))]
)
def test_wrapped_models_have_the_names_of_plain_ones(variant: str, tmp_path: Path) -> None:
    run = train(variant, tmp_path)
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
    if variant == "ddp":
        assert_only_second_rank(tensorprobe.open_run(tmp_path / "second"))


def assert_only_second_rank(run: Run) -> None:
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

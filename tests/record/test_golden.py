"""A run spelled out byte by byte, and what reading it must give."""

import math
import struct
from pathlib import Path

import pytest
import torch

from tensorprobe.model import Frame, Summary
from tensorprobe.record import open_run, verify_run
from tests.builders.runs import write_manifest, write_rank

CALLS = (
    b'{"name":"Functional.linear.0.forward","module":"head","parent":"Module.head.Linear.forward.0","stack":0,'
    b'"args":[{"slot":"input.0"},{"slot":"input.1"}],"kwargs":{},"slots":['
    b'{"name":"input.0","dtype":"float32","shape":[2],"summary":[2.0,1.0,1.5,2.23606797749979,0,0],'
    b'"digest":"4533ce61c4655ba3c3e077b25dd1d769","offset":0,"nbytes":8},'
    b'{"name":"input.1","dtype":"bfloat16","shape":[2,1],"grad":true,"offset":64,"nbytes":4},'
    b'{"name":"output.0","dtype":"float16","shape":[],"summary":["Infinity","-Infinity","NaN","NaN",0,1],'
    b'"offset":128,"nbytes":2}]}\n'
    b'{"name":"Functional.linear.0.backward","thread":1,"slots":['
    b'{"name":"input.0","dtype":"complex64","shape":[1],"offset":192,"nbytes":8},'
    b'{"name":"output.0","dtype":"float32","shape":[2],"offset":0,"nbytes":8},'
    b'{"name":"parameters.weight","dtype":"sparse","shape":[9],"device":"npu:0","skipped":"sparse layout"}]}\n'
    b'{"name":"Module.head.Linear.forward.0","level":"module","repeat":1,"raised":"ValueError"}\n'
)
STACKS = b'{"id":0,"frames":[["train.py",88,"forward","y = F.linear(x, w)"],["train.py",9,"main",""]]}\n'
TENSORS = b"".join(
    piece.ljust(64, b"\0")
    for piece in (
        struct.pack("<ff", 1.0, 2.0),
        struct.pack("<HH", 0x3F80, 0xC000),  # 1.0 and -2.0 in bfloat16
        struct.pack("<e", math.inf),
        struct.pack("<ff", 3.0, -4.0),
    )
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    root = tmp_path / "a run 运行"
    write_manifest(root)
    write_rank(root, coverage={"seen": 3, "recorded": 3})
    folder = root / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "calls.jsonl").write_bytes(CALLS)
    (folder / "stacks.jsonl").write_bytes(STACKS)
    (folder / "tensors.bin").write_bytes(TENSORS)
    return root


def test_calls_come_in_order_with_what_was_written(golden: Path) -> None:
    run = open_run(golden)
    forward, backward, module = run.calls()
    assert (run.steps, run.ranks, run.closed, len(run.parts)) == ([0], [0], True, 1)
    assert (forward.op, forward.number, forward.direction, forward.level) == ("Functional.linear", 0, "forward", "api")
    assert (forward.module, forward.parent, forward.thread) == ("head", "Module.head.Linear.forward.0", 0)
    assert (forward.args, forward.kwargs) == ([{"slot": "input.0"}, {"slot": "input.1"}], {})
    assert (backward.direction, backward.thread, backward.stack, backward.args) == ("backward", 1, None, None)
    assert (module.level, module.repeat, module.raised, module.slots) == ("module", 1, "ValueError", ())
    assert [call.index for call in (forward, backward, module)] == [0, 1, 2]
    assert (forward.step, forward.rank, forward.origin) == (0, 0, None)


def test_slots_come_with_what_was_written(golden: Path) -> None:
    forward, backward, _ = open_run(golden).calls()
    first, second, out = forward.slots
    assert [held.name for held in forward.inputs] == ["input.0", "input.1"]
    assert [held.name for held in forward.outputs] == ["output.0"]
    assert [held.name for held in backward.parameters] == ["parameters.weight"]
    assert first.summary == Summary(2.0, 1.0, 1.5, 2.23606797749979, 0, 0)
    assert first.digest == "4533ce61c4655ba3c3e077b25dd1d769"
    assert (first.side, first.count, first.nbytes, first.offset, first.stride) == ("input", 2, 8, 0, None)
    assert (second.grad, second.device, second.dtype, second.shape) == (True, "cpu", "bfloat16", (2, 1))
    assert out.summary is not None
    assert out.summary.max == math.inf
    assert math.isnan(float(out.summary.mean))
    skipped = backward.parameters[0]
    assert (skipped.skipped, skipped.has_data, skipped.device) == ("sparse layout", False, "npu:0")


def test_values_are_those_of_the_bytes(golden: Path) -> None:
    forward, backward, _ = open_run(golden).calls()
    assert torch.equal(forward.slots[0].tensor(), torch.tensor([1.0, 2.0]))
    assert torch.equal(forward.slots[1].tensor(), torch.tensor([[1.0], [-2.0]], dtype=torch.bfloat16))
    assert torch.equal(forward.slots[2].tensor(), torch.tensor(math.inf, dtype=torch.float16))
    assert backward.slots[0].tensor().tolist() == [3 - 4j]
    assert forward.slots[1].numpy().tolist() == [[1.0], [-2.0]]
    assert bytes(forward.slots[0].buffer()) == struct.pack("<ff", 1.0, 2.0)
    assert backward.slots[1].tensor().tolist() == forward.slots[0].tensor().tolist()


def test_stack_is_found_by_its_id(golden: Path) -> None:
    run = open_run(golden)
    forward, backward, _ = run.calls()
    stack = run.stack(forward)
    assert stack is not None
    assert stack.frames[0] == Frame("train.py", 88, "forward", "y = F.linear(x, w)")
    assert run.stack(backward) is None


def test_golden_run_is_sound(golden: Path) -> None:
    result = verify_run(open_run(golden), data=True)
    assert (result.problems, result.calls, result.slots, result.bytes_hashed) == ([], 3, 6, 8)


def test_version_2_adds_provenance_written_ranges_roles_and_phases(tmp_path: Path) -> None:
    write_manifest(tmp_path, version=2, provenance={"argv": ["python", "train.py"], "switches": {"threads": 2}})
    write_rank(tmp_path, coverage={"seen": 1, "recorded": 1})
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "calls.jsonl").write_bytes(
        b'{"name":"Tensor.clone.0.forward","slots":[{"name":"input.0","dtype":"float32","shape":[2],"offset":0,"nbytes":8,'
        b'"written":[[0,1]],"role":"parameter head.weight"}],"phase":"optimizer","microbatch":3}\n'
    )
    (folder / "tensors.bin").write_bytes(struct.pack("<ff", 1.0, 0.0))
    run = open_run(tmp_path)
    (call,) = run.calls()
    assert run.manifest.provenance == {"argv": ["python", "train.py"], "switches": {"threads": 2}}
    assert (call.slots[0].written, call.slots[0].model.role) == (((0, 1),), "parameter head.weight")
    assert (call.model.phase, call.model.microbatch) == ("optimizer", 3)


def test_version_1_has_none_of_these(golden: Path) -> None:
    run = open_run(golden)
    assert (run.manifest.version, run.manifest.provenance) == (1, {})
    assert all(slot.written is None for call in run.calls() for slot in call.slots)

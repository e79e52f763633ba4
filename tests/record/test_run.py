"""What a run gives: its calls in order, found by name, without ever reading what nobody asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.errors import NotFound, RunDamaged
from tensorprobe.record import blob, open_run, reader
from tensorprobe.text import ranges
from tests.builders.runs import Blob, slot, write_calls, write_manifest, write_rank, write_run


def calls_named(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    write_manifest(tmp_path, world_size=2)
    for rank in (0, 1):
        write_rank(tmp_path, rank, steps=[0, 10], device=f"npu:{rank}")
        for step in (10, 0):
            write_calls(tmp_path, calls_named(f"Torch.s{step}r{rank}.0.forward"), step=step, rank=rank)
    return tmp_path


def test_calls_go_step_by_step_and_in_a_step_rank_by_rank(two_ranks: Path) -> None:
    run = open_run(str(two_ranks))
    assert [call.op for call in run.calls()] == ["Torch.s0r0", "Torch.s0r1", "Torch.s10r0", "Torch.s10r1"]
    assert [call.op for call in run.calls(step=10)] == ["Torch.s10r0", "Torch.s10r1"]
    assert [call.op for call in run.calls(rank=1)] == ["Torch.s0r1", "Torch.s10r1"]
    assert (run.steps, run.ranks, run.parts[1].device) == ([0, 10], [0, 1], "npu:1")


@pytest.mark.parametrize(
    ("choice", "told"),
    [({"step": 7}, r"no step 7 in .*It holds steps 0, 10\."), ({"rank": 5}, r"no rank 5 in .*It holds ranks 0-1\.")],
)
def test_unknown_step_or_rank_is_told_with_those_there_are(choice: dict[str, int], told: str, two_ranks: Path) -> None:
    with pytest.raises(NotFound, match=told):
        list(open_run(two_ranks).calls(**choice))


def test_rank_without_the_step_is_told(two_ranks: Path) -> None:
    write_calls(two_ranks, calls_named("Torch.mm.0.forward"), step=3, rank=0)
    with pytest.raises(NotFound, match="rank 1 recorded nothing in step 3"):
        open_run(two_ranks).names(3, 1)


def test_name_without_direction_finds_forward_and_backward_only_of_that_number(tmp_path: Path) -> None:
    names = ["Functional.conv2d.1.forward", "Functional.conv2d.10.forward", "Functional.conv2d.1.backward"]
    write_run(tmp_path, calls_named(*names))
    run = open_run(tmp_path)
    assert [call.name for call in run.find("Functional.conv2d.1")] == [names[0], names[2]]
    assert [call.name for call in run.find(names[2])] == [names[2]]
    assert len(run.find("Functional.conv2d")) == 3
    assert run.call("Functional.conv2d.1").name == names[0]
    assert run.call(names[1]).index == 1
    assert run.names(0, 0) == names


def test_call_is_found_in_the_first_step_that_has_it(two_ranks: Path) -> None:
    found = open_run(two_ranks).call("Torch.s10r1.0")
    assert (found.step, found.rank) == (10, 1)


def test_a_part_of_a_name_is_answered_with_the_names_that_hold_it(two_ranks: Path) -> None:
    with pytest.raises(NotFound, match=r"no call 'S10R1' .*\n  Nearest: Torch\.s10r1"):
        open_run(two_ranks).call("S10R1")


def test_repeats_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, [{"name": "Torch.mm.0.forward"}, {"name": "Torch.mm.0.forward", "repeat": 1}])
    run = open_run(tmp_path)
    assert run.call("Torch.mm.0", repeat=1).index == 1
    assert len(run.find("Torch.mm.0.forward")) == 2
    with pytest.raises(NotFound, match=r"Torch\.mm\.0 has no repeat 5"):
        run.call("Torch.mm.0", repeat=5)


def test_unknown_call_is_told_with_the_nearest(tmp_path: Path) -> None:
    write_run(tmp_path, calls_named("Functional.conv2d.0.forward", "Torch.matmul.3.forward"))
    with pytest.raises(NotFound, match=r"(?s)no call 'Functional\.conv3d\.0'.*Nearest: .*Functional\.conv2d"):
        open_run(tmp_path).call("Functional.conv3d.0")


def test_unknown_call_with_nothing_near_points_to_the_list(tmp_path: Path) -> None:
    write_run(tmp_path, calls_named("Functional.conv2d.0.forward"))
    with pytest.raises(NotFound, match="tensorprobe inspect"):
        open_run(tmp_path).call("zzzz")


def test_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, b'{"name":"Torch.mm.0.forward"}\n{"name":"Torch.mm.1.forward"}')
    run = open_run(tmp_path)
    assert [call.name for call in run.calls()] == run.names(0, 0) == ["Torch.mm.0.forward"]
    assert run.damage(0, 0) == []


def test_damaged_line_is_raised_after_the_good_ones(tmp_path: Path) -> None:
    write_run(tmp_path, b'{"name":"Torch.mm.0.forward"}\n{"name":"Tor\x00\n{"name":"Torch.mm.2.forward"}\n')
    run = open_run(tmp_path)
    calls = run.calls()
    assert next(calls).name == "Torch.mm.0.forward"
    with pytest.raises(RunDamaged, match=r"step0/rank0/calls\.jsonl, line 2: not JSON"):
        next(calls)
    with pytest.raises(RunDamaged, match="line 2"):
        run.names(0, 0)


def test_behind_a_damaged_line_reading_goes_on_when_asked_to(tmp_path: Path) -> None:
    write_run(tmp_path, b'{"name":"Torch.mm.0.forward"}\n\n{"name":"Torch.mm.2.forward"}\n{"name":5}\n')
    run = open_run(tmp_path)
    assert [(call.index, call.name) for call in run.calls(on_damage="skip")] == [
        (0, "Torch.mm.0.forward"),
        (2, "Torch.mm.2.forward"),
    ]
    assert [damage.line for damage in run.damage(0, 0)] == [2, 4]
    assert run.names(0, 0, on_damage="skip") == ["Torch.mm.0.forward", "Torch.mm.2.forward"]
    assert run.call("Torch.mm.2").index == 2


def test_lines_across_blocks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"Torch.mm.{number}.forward" for number in range(50)]
    write_run(tmp_path, calls_named(*names))
    monkeypatch.setattr("tensorprobe.record.lines.BLOCK", 7)
    run = open_run(tmp_path)
    assert run.names(0, 0) == [call.name for call in run.calls()] == names
    assert run.call("Torch.mm.49").name == names[49]


def test_killed_run_is_readable_and_not_closed(tmp_path: Path) -> None:
    write_run(tmp_path, calls_named("Torch.mm.0.forward"), closed=False)
    (tmp_path / "step1/rank0").mkdir(parents=True)
    run = open_run(tmp_path)
    assert run.closed is False
    assert run.steps == [0, 1]
    assert len(list(run.calls())) == 1


def test_lost_part_of_a_rank_leaves_its_calls_readable(tmp_path: Path) -> None:
    write_run(tmp_path, calls_named("Torch.mm.0.forward"))
    (tmp_path / "rank0.json").unlink()
    run = open_run(tmp_path)
    assert (run.ranks, run.closed, len(list(run.calls()))) == ([0], False, 1)


def test_run_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    write_run(tmp_path / "real", calls_named("Torch.mm.0.forward"))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(list(open_run(tmp_path / "link").calls())) == 1


def test_mappings_held_at_once_are_bounded(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    write_rank(tmp_path)
    content = Blob()
    line = {"name": "Torch.mm.0.forward", "slots": [slot("output.0", "float32", [2], bytes(8), content)]}
    steps = blob.MAX_MAPPED + 5
    for step in range(steps):
        (write_calls(tmp_path, [line], step=step) / "tensors.bin").write_bytes(content.content)
    run = open_run(tmp_path)
    held = [call.slots[0].tensor() for call in run.calls()]
    pool = run.segment(0, 0).source._pool  # type: ignore[attr-defined]
    assert (len(held), len(pool)) == (steps, blob.MAX_MAPPED)
    assert sum(float(tensor.sum()) for tensor in held) == 0
    assert run.call("Torch.mm.0", step=0).slots[0].tensor().tolist() == [0, 0]


def test_tensor_written_after_the_file_was_mapped_is_found(tmp_path: Path) -> None:
    content = Blob()
    first = slot("output.0", "float32", [2], bytes(8), content)
    second = slot("output.1", "float32", [2], bytes([1] * 8), content)
    folder = write_run(tmp_path, [{"name": "Torch.mm.0.forward", "slots": [first, second]}], content.content[:64])
    held = open_run(tmp_path).call("Torch.mm.0").slots
    assert bytes(held[0].buffer()) == bytes(8)
    (folder / "tensors.bin").write_bytes(content.content)
    assert bytes(held[1].buffer()) == bytes([1] * 8)


def test_index_of_many_calls_decodes_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"dtype": "float32", "shape": [16], "summary": [1.0, 0.0, 0.5, 2.0, 0, 0], "offset": 0, "nbytes": 64}
    slots = [{"name": f"input.{at}", **described} for at in range(5)]
    rest = json.dumps(slots).encode()
    lines = (b'{"name":"Torch.mm.%d.forward","slots":%s}\n' % (number, rest) for number in range(100_000))
    write_run(tmp_path, b"".join(lines))
    decoded = []
    real = reader._read_call
    monkeypatch.setattr(reader, "_read_call", lambda raw: decoded.append(raw) or real(raw))
    monkeypatch.setattr(blob.Blob, "read", lambda *_: pytest.fail("a tensor was read"))
    run = open_run(tmp_path)
    assert len(run.names(0, 0)) == 100_000
    assert decoded == []
    assert run.call("Torch.mm.99999").index == 99_999
    assert len(decoded) == 1


def test_listing_a_run_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    write_run(tmp_path, calls_named("Torch.mm.0.forward"))
    program = (
        "import sys; from tensorprobe.record import open_run; run = open_run(sys.argv[1]);"
        "assert len(list(run.calls())) == len(run.names(0, 0)) == 1; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_numbers_are_worded_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"

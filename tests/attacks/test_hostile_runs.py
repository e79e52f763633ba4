"""Broken and hostile runs: each gives its own clear error or a readable part, and never a crash or a hang."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.errors import RunDamaged, RunNotFound, TensorDamaged, TensorprobeError, UnsupportedVersion
from tensorprobe.record import open_run, verify_run
from tensorprobe.record.lines import MAX_DAMAGED, MAX_LINE
from tests.builders.runs import MANIFEST, Blob, slot, write_calls, write_json, write_manifest, write_rank, write_run

NAME = "Torch.mm.0.forward"
GOOD = b'{"name":"Torch.mm.0.forward"}\n'
DEEP = b"[" * 200_000 + b"]" * 200_000


def good_run(root: Path, **changes: Any) -> Path:
    """A run of one call with one tensor of 16 floats; `changes` go into its slot."""
    content = Blob()
    described = {**slot("output.0", "float32", [16], bytes(range(64)), content), **changes}
    return write_run(root, [{"name": NAME, "slots": [described]}], content.content)


LINES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "zeros": (b"\0" * 100, "not JSON"),
    "not an object": (b"[1, 2]", "Expected `object`"),
    "name is a number": (b'{"name": 5}', "Expected `str`"),
    "no name": (b"{}", "required field `name`"),
    "name without number": (b'{"name": "conv2d"}', "'conv2d' is not the name of a call"),
    "name without direction": (b'{"name": "Torch.mm.0.sideways"}', "is not the name of a call"),
    "name with control characters": (b'{"name": "\\u001b[2J.mm.0.forward"}', "is not the name of a call"),
    "name with an endless number": (b'{"name": "a.' + b"9" * 5000 + b'.forward"}', "length <= 4096"),
    "not UTF-8": (b'{"name": "\xff.mm.0.forward"}', "not UTF-8"),
    "lone surrogate": (b'{"name": "\\ud800.mm.0.forward"}', "not JSON"),
    "NaN": (b'{"name": "Torch.mm.0.forward", "thread": NaN}', "not JSON"),
    "huge number": (b'{"name": "Torch.mm.0.forward", "thread": 1e999}', "out of range"),
    "number of 5000 digits": (b'{"name": "Torch.mm.0.forward", "args": ' + b"9" * 5000 + b"}", "out of range"),
    "deep nesting": (b'{"name": "Torch.mm.0.forward", "args": ' + DEEP + b"}", "nested too deeply"),
    "two objects": (b'{"name": "Torch.mm.0.forward"}{}', "trailing characters"),
    "unknown level": (b'{"name": "Torch.mm.0.forward", "level": "kernel"}', "Invalid enum value"),
    "slots is a string": (b'{"name": "Torch.mm.0.forward", "slots": "all"}', "Expected `array`"),
    "shape of floats": (
        b'{"name": "Torch.mm.0.forward", "slots": [{"name": "a", "dtype": "b", "shape": [1.5]}]}',
        "Expected `int`",
    ),
    "summary of words": (
        b'{"name": "Torch.mm.0.forward", "slots": [{"name": "a", "dtype": "b", "shape": [], "summary": ["x",1,1,1]}]}',
        "could not convert",
    ),
}


@pytest.mark.parametrize("attack", LINES)
def test_hostile_line_is_named_and_the_others_are_read(attack: str, tmp_path: Path) -> None:
    line, told = LINES[attack]
    write_run(tmp_path, GOOD + line + b"\n" + b'{"name":"Torch.mm.2.forward"}\n')
    run = open_run(tmp_path)
    assert [call.index for call in run.calls(on_damage="skip")] == [0, 2]
    with pytest.raises(RunDamaged) as raised:
        list(run.calls())
    assert "calls.jsonl, line 2: " in str(raised.value)
    assert told in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert [damage.line for damage in run.damage(0, 0)] == [2]
    assert not verify_run(run).sound


def test_of_a_repeated_key_the_last_counts_for_index_and_call_alike(tmp_path: Path) -> None:
    write_run(tmp_path, b'{"name":"Torch.mm.0.forward","name":"Torch.mm.1.forward"}\n')
    run = open_run(tmp_path)
    assert run.names(0, 0) == [call.name for call in run.calls()] == ["Torch.mm.1.forward"]


def test_arguments_nested_less_deeply_are_refused_when_looked_at(tmp_path: Path) -> None:
    write_run(tmp_path, b'{"name":"Torch.mm.0.forward","args":' + b"[" * 300 + b"]" * 300 + b"}\n")
    (call,) = open_run(tmp_path).calls()
    with pytest.raises(RunDamaged, match="nested more than 100 deep"):
        _ = call.args


def test_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path, GOOD)
    with (folder / "calls.jsonl").open("r+b") as file:
        file.truncate(1 << 40)
    run = open_run(tmp_path)
    assert [call.index for call in run.calls(on_damage="skip")] == [0]
    (damage,) = run.damage(0, 0)
    assert (damage.line, f"longer than {MAX_LINE:,} bytes" in damage.reason) == (2, True)


def test_file_of_nothing_but_damage_is_given_up(tmp_path: Path) -> None:
    write_run(tmp_path, b"\n" * (5 * MAX_DAMAGED) + GOOD)
    run = open_run(tmp_path)
    assert list(run.calls(on_damage="skip")) == []
    assert len(run.damage(0, 0)) == MAX_DAMAGED + 1
    assert f"after {MAX_DAMAGED:,} damaged lines" in run.damage(0, 0)[-1].reason


SLOTS: dict[str, tuple[dict[str, Any], str]] = {
    "negative offset": ({"offset": -64}, "offset -64 is not a multiple of 64"),
    "unaligned offset": ({"offset": 8}, "offset 8 is not a multiple of 64"),
    "offset past the end": ({"offset": 64}, "ends at byte 128, the file holds 64"),
    "enormous offset": ({"offset": 2**80}, "the file holds 64"),
    "too few bytes declared": ({"nbytes": 60}, r"declares 60 bytes; float32 [16] has 64"),
    "negative bytes": ({"nbytes": -64}, "declares -64 bytes"),
    "shape of 10 GB": ({"shape": [2_500_000_000], "nbytes": 10_000_000_000}, "the file holds 64"),
    "negative dimension": ({"shape": [-4, -4]}, "shape [-4, -4] is impossible"),
    "overflowing product": ({"shape": [2**40, 2**40], "nbytes": 2**82}, "is impossible"),
    "product that wraps to 64 bytes": ({"shape": [2**62 + 4, 4]}, "is impossible"),
    "dimension over 64 bits": ({"shape": [2**70, 0], "nbytes": 0}, "is impossible"),
    "thousands of dimensions": ({"shape": [1] * 5000, "nbytes": 4}, "5,000 dimensions"),
    "unknown dtype": ({"dtype": "float3"}, "dtype 'float3' is not a known dtype"),
    "dtype that is a function of torch": ({"dtype": "load"}, "dtype 'load' is not a known dtype"),
    "strides for other dimensions": ({"stride": [1, 1]}, "2 strides for 1 dimensions"),
    "negative stride": ({"stride": [-1]}, "stride [-1] is impossible"),
    "stride over 64 bits": ({"shape": [16, 1], "stride": [1, 2**70]}, "is impossible"),
    "bool that is neither": ({"dtype": "bool", "shape": [64]}, "bytes other than 0 and 1"),
}


@pytest.mark.parametrize("attack", SLOTS)
def test_hostile_slot_is_refused_before_its_bytes_are_touched(attack: str, tmp_path: Path) -> None:
    changes, told = SLOTS[attack]
    good_run(tmp_path, **changes)
    held = open_run(tmp_path).call(NAME).slots[0]
    for read in (held.tensor, held.numpy):
        with pytest.raises(TensorDamaged) as raised:
            read()
        assert "output.0 of Torch.mm.0.forward (call 0, rank 0, step 0)" in str(raised.value)
        assert told in str(raised.value)


@pytest.mark.parametrize("attack", [name for name in SLOTS if name != "bool that is neither"])
def test_verify_finds_the_hostile_slot(attack: str, tmp_path: Path) -> None:
    changes, told = SLOTS[attack]
    good_run(tmp_path, **changes)
    (problem,) = verify_run(open_run(tmp_path)).problems
    assert told in problem.fact
    assert "line 1 (Torch.mm.0.forward), output.0" in problem.where


def test_stride_with_holes_cannot_read_past_its_bytes(tmp_path: Path) -> None:
    good_run(tmp_path, stride=[1_000_000])
    assert open_run(tmp_path).call(NAME).slots[0].tensor().is_contiguous()


def test_tensors_cut_short_are_told_with_both_sizes(tmp_path: Path) -> None:
    (good_run(tmp_path) / "tensors.bin").write_bytes(bytes(40))
    with pytest.raises(TensorDamaged, match=r"ends at byte 64, the file holds 40\. The disk may have filled"):
        open_run(tmp_path).call(NAME).slots[0].tensor()


def test_tensors_cut_short_after_they_were_mapped_do_not_kill_the_process(tmp_path: Path) -> None:
    folder = good_run(tmp_path)
    held = open_run(tmp_path).call(NAME).slots[0]
    held.buffer()
    with (folder / "tensors.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(TensorDamaged, match="the file holds 10"):
        held.tensor()


@pytest.mark.parametrize(("content", "told"), [(None, "is missing"), (b"", "is empty")])
def test_missing_or_empty_tensors_leave_the_call_readable(content: bytes | None, told: str, tmp_path: Path) -> None:
    file = good_run(tmp_path) / "tensors.bin"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    held = open_run(tmp_path).call(NAME).slots[0]
    assert held.shape == (16,)
    with pytest.raises(TensorDamaged, match=told):
        held.tensor()


def test_flipped_bit_is_found_by_reading_all_bytes(tmp_path: Path) -> None:
    file = good_run(tmp_path) / "tensors.bin"
    content = bytearray(file.read_bytes())
    content[33] ^= 4
    file.write_bytes(content)
    run = open_run(tmp_path)
    assert verify_run(run).sound
    (problem,) = verify_run(run, data=True).problems
    assert "its bytes changed since they were written" in problem.fact


def two_slots(root: Path, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    described = {"dtype": "uint8", "shape": [128], "offset": 0, "nbytes": 128}
    slots = [{"name": "input.0", **described, **first}, {"name": "output.0", **described, **second}]
    write_run(root, [{"name": NAME, "slots": slots}], bytes(256))
    return [problem.fact for problem in verify_run(open_run(root)).problems]


def test_overlapping_ranges_are_found(tmp_path: Path) -> None:
    (fact,) = two_slots(tmp_path, {}, {"offset": 64})
    assert "its bytes 64-192 overlap those of" in fact


def test_one_range_with_two_digests_is_found(tmp_path: Path) -> None:
    (fact,) = two_slots(tmp_path, {"digest": "a" * 32}, {"digest": "b" * 32})
    assert "which has another digest" in fact


def test_shared_and_neighbouring_ranges_are_sound(tmp_path: Path) -> None:
    assert two_slots(tmp_path / "a", {"digest": "a" * 32}, {"digest": "a" * 32}) == []
    assert two_slots(tmp_path / "b", {"digest": "a" * 32}, {}) == []
    assert two_slots(tmp_path / "c", {}, {"offset": 128}) == []


MANIFESTS: dict[str, tuple[bytes, type[TensorprobeError], str]] = {
    "empty": (b"", RunDamaged, "cannot be read"),
    "cut": (json.dumps(MANIFEST).encode()[:50], RunDamaged, "cannot be read"),
    "newer version": (json.dumps({**MANIFEST, "version": 3}).encode(), UnsupportedVersion, "format version 3"),
    "newer version with unknown keys only": (
        b'{"format": "tensorprobe-run", "version": 9}',
        UnsupportedVersion,
        "pip install -U tensorprobe",
    ),
    "version 0": (json.dumps({**MANIFEST, "version": 0}).encode(), RunDamaged, "versions count from 1"),
    "version is a word": (json.dumps({**MANIFEST, "version": "1"}).encode(), RunDamaged, "Expected `int`"),
    "other format": (b'{"format": "chrome-extension", "version": 1}', RunNotFound, "has format 'chrome-extension'"),
    "no format": (b'{"name": "x", "manifest_version": 3}', RunNotFound, "has format ''"),
    "deep nesting": (b'{"format": ' + DEEP + b"}", RunDamaged, "cannot be read"),
    "deep settings": (
        json.dumps({**MANIFEST, "settings": {"a": 0}}).encode().replace(b'"a": 0', b'"a":' + b"[" * 300 + b"]" * 300),
        RunDamaged,
        "nested more than 100",
    ),
    "NaN": (json.dumps({**MANIFEST, "world_size": float("nan")}).encode(), RunDamaged, "cannot be read"),
    "larger than any": (b" " * ((16 << 20) + 1), RunDamaged, "16,777,217 bytes; at most 16,777,216 are read"),
}


@pytest.mark.parametrize("attack", MANIFESTS)
def test_hostile_manifest_is_refused(attack: str, tmp_path: Path) -> None:
    content, error, told = MANIFESTS[attack]
    good_run(tmp_path)
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(error) as raised:
        open_run(tmp_path)
    assert told in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"rank": "zero"}, "Expected `int`"),
        ({"rank": 0, "pid": 1, "host": "h", "closed": "yes"}, "Expected `bool`"),
        ({"rank": 3, "pid": 1, "host": "h"}, "says it belongs to rank 3"),
        ([], "Expected `object`"),
    ],
)
def test_hostile_part_of_a_rank_is_refused(part: Any, told: str, tmp_path: Path) -> None:
    good_run(tmp_path)
    write_json(tmp_path / "rank0.json", part)
    with pytest.raises(RunDamaged, match=told) as raised:
        open_run(tmp_path)
    assert "rank0.json" in str(raised.value)


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**70])
def test_hostile_process_number_is_asked_of_nobody(pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    write_run(tmp_path, GOOD, closed=False, pid=pid, host=socket.gethostname())
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process was signalled"))
    assert open_run(tmp_path).closed is False


def link_to_outside(path: Path, outside: Path) -> None:
    """Move a file or folder of the run outside, and leave a link to it in its place."""
    moved = outside / f"outside-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("name", ["step0", "step0/rank0", "manifest.json", "rank0.json"])
def test_link_in_the_run_is_refused_when_it_is_opened(name: str, tmp_path: Path) -> None:
    good_run(tmp_path / "run")
    link_to_outside(tmp_path / "run" / name, tmp_path)
    with pytest.raises(RunDamaged, match="is a symbolic link, where a run has a f"):
        open_run(tmp_path / "run")


def read_calls(root: Path) -> None:
    list(open_run(root).calls())


def read_names(root: Path) -> None:
    open_run(root).names(0, 0)


def read_tensor(root: Path) -> None:
    open_run(root).call(NAME).slots[0].tensor()


def read_stack(root: Path) -> None:
    run = open_run(root)
    run.stack(run.call(NAME))


FILES: dict[str, Callable[[Path], None]] = {
    "calls.jsonl": read_calls,
    "tensors.bin": read_tensor,
    "stacks.jsonl": read_stack,
}


def run_with_stack(root: Path) -> Path:
    folder = good_run(root)
    line = json.loads((folder / "calls.jsonl").read_bytes())
    (folder / "calls.jsonl").write_text(json.dumps({**line, "stack": 0}) + "\n")
    (folder / "stacks.jsonl").write_text('{"id": 0, "frames": []}\n')
    FILES["stacks.jsonl"](root)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_link_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    folder = run_with_stack(tmp_path / "run")
    link_to_outside(folder / name, tmp_path)
    with pytest.raises(RunDamaged, match=rf"{name}' is a symbolic link"):
        FILES[name](tmp_path / "run")


@pytest.mark.parametrize("name", FILES)
def test_pipe_in_place_of_a_file_is_refused_without_waiting(name: str, tmp_path: Path) -> None:
    folder = run_with_stack(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(RunDamaged, match=rf"{name}' is a pipe"):
        FILES[name](tmp_path)
    assert verify_run(open_run(tmp_path)).problems


@pytest.mark.parametrize("name", ["manifest.json", "rank0.json"])
def test_pipe_in_place_of_json_is_refused_without_waiting(name: str, tmp_path: Path) -> None:
    good_run(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunDamaged, match="is a pipe"):
        open_run(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_folder_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    folder = run_with_stack(tmp_path)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(RunDamaged, match=rf"{name}' is a folder"):
        FILES[name](tmp_path)


@pytest.mark.parametrize("name", ["step3", "step0/rank3"])
def test_file_in_place_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    good_run(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(RunDamaged, match="is a file, where a run has a folder"):
        open_run(tmp_path)


@pytest.mark.parametrize("name", ["step01", "step-1", "step1.5", "step", "step٣", "step" + "9" * 40, "..step2"])
def test_names_that_only_look_like_steps_are_left_alone(name: str, tmp_path: Path) -> None:
    good_run(tmp_path)
    (tmp_path / name / "rank0").mkdir(parents=True)
    assert open_run(tmp_path).steps == [0]


@pytest.mark.parametrize("read", [read_calls, read_names])
def test_missing_calls_of_a_closed_rank_are_damage(read: Callable[[Path], None], tmp_path: Path) -> None:
    (good_run(tmp_path) / "calls.jsonl").unlink()
    with pytest.raises(RunDamaged, match=r"lacks step0/rank0/calls\.jsonl, although its rank lists it as written"):
        read(tmp_path)


def test_missing_step_and_missing_calls_are_found(tmp_path: Path) -> None:
    good_run(tmp_path)
    write_rank(tmp_path, steps=[0, 1], coverage={"seen": 5, "recorded": 5})
    facts = [str(problem) for problem in verify_run(open_run(tmp_path)).problems]
    assert facts == [
        "rank0.json: lists step 1, which has no folder step1/rank0",
        "rank0.json: counts 5 calls; 1 can be read",
    ]


def test_forged_calls_are_found(tmp_path: Path) -> None:
    strange = {"name": "sideways.0", "dtype": "float32", "shape": [], "digest": "../../etc/passwd"}
    write_run(tmp_path, [{"name": NAME, "stack": 4, "slots": [strange]}, {"name": NAME}])
    facts = [problem.fact for problem in verify_run(open_run(tmp_path)).problems]
    assert facts == [
        "its stack 4 is not in stacks.jsonl",
        "is neither an input nor an output nor a parameter",
        "its digest '../../etc/passwd' is not 32 hexadecimal digits",
        "recorded twice with repeat 0",
    ]


def test_complaints_are_bounded(tmp_path: Path) -> None:
    slots = [{"name": f"sideways.{at}", "dtype": "float32", "shape": []} for at in range(3000)]
    write_run(tmp_path, [{"name": NAME, "slots": slots}])
    result = verify_run(open_run(tmp_path))
    assert (len(result.problems), result.cut) == (1000, True)


def test_damaged_stacks_do_not_hide_the_calls(tmp_path: Path) -> None:
    folder = run_with_stack(tmp_path)
    (folder / "stacks.jsonl").write_text("{}\n")
    with pytest.raises(RunDamaged, match=r"stacks\.jsonl, line 1: .*Its calls and tensors are not affected"):
        read_stack(tmp_path)
    read_tensor(tmp_path)
    assert not verify_run(open_run(tmp_path)).sound


def test_no_folder_and_no_run_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no folder"):
        open_run(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunNotFound, match="is not a folder"):
        open_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunNotFound, match=r"(?s)\(no manifest\.json\)\..*The folder is empty"):
        open_run(tmp_path / "empty")


def test_folder_of_runs_names_them(tmp_path: Path) -> None:
    for name in ("gpu-0411", "gpu-0412", "gpu-0413"):
        write_manifest(tmp_path / name)
    with pytest.raises(RunNotFound) as raised:
        open_run(tmp_path)
    assert str(raised.value) == (
        f"no run in '{tmp_path}' (no manifest.json).\n"
        f"  It holds 3 runs: gpu-0411, gpu-0412, gpu-0413. Pass one: {tmp_path}/gpu-0413"
    )


def test_folder_inside_a_run_points_to_the_run(tmp_path: Path) -> None:
    good_run(tmp_path)
    with pytest.raises(RunNotFound, match=rf"It is inside a run\. Pass that: {tmp_path}$"):
        open_run(tmp_path / "step0")


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("step0/rank0/construct.json", "a dump of msprobe"),
        ("ptdbg_dump_v4.0/rank0/npu_dump.pkl", "a dump of ptdbg_ascend"),
        ("model.safetensors", "a checkpoint"),
        ("notes.txt", r"It holds notes\.txt"),
    ],
)
def test_dump_of_another_tool_is_recognised(file: str, told: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(RunNotFound, match=told):
        open_run(tmp_path)


def test_every_prefix_of_the_calls_file_is_readable(tmp_path: Path) -> None:
    content = b'{"name":"Torch.mm.0.forward"}\n{"name":"Torch.mm.1.forward","module":"a"}\n'
    write_manifest(tmp_path)
    write_rank(tmp_path, closed=False)
    for length in range(len(content) + 1):
        write_calls(tmp_path, content[:length])
        assert len(list(open_run(tmp_path).calls())) == content[:length].count(b"\n")

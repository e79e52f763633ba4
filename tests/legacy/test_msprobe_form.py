"""The layout of msprobe as the recorder writes it: whole JSON at every moment, files of torch.save without torch."""

from __future__ import annotations

import errno
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

from tensorprobe.errors import RunDamaged, RunExists
from tensorprobe.legacy.layouts.msprobe_json import (
    GrowingObject,
    argument_entry,
    as_number,
    backward_entry,
    object_text,
    tensor_entry,
)
from tensorprobe.legacy.layouts.pt_writer import frame_tensor
from tensorprobe.legacy.layouts.targets import MsprobeTarget, prepare_target
from tensorprobe.model import DTYPES
from tensorprobe.model.event import SlotEvent
from tensorprobe.numerics.summary import Moments
from tensorprobe.record import open_run
from tensorprobe.record.writer import RunWriter
from tests.builders.dtypes import KNOWN_DTYPES
from tests.record.writing import call, close, slot

NEEDS = {
    "complex32": "2.4",
    "float8_e4m3fn": "2.4",
    "float8_e5m2": "2.4",
    **dict.fromkeys(("uint16", "uint32", "uint64"), "2.6"),
}
SHAPES = [(), (3,), (2, 3), (2, 1, 300, 2), (0, 4), (70_000,), (1, 2, 1, 2, 1)]


def strict(path: Path) -> Any:
    """What the file holds, as standard JSON: nothing bare."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} stands bare")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.needs_torch(NEEDS.get(dtype, "2.1"), f"torch.load of {dtype}"))
        for dtype in KNOWN_DTYPES
    ],
)
def test_a_written_pt_file_is_one_of_torch(dtype: str, tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES if dtype == "float32" else SHAPES[:3]):
        content = numpy.random.default_rng(0).integers(0, 2, (*shape, DTYPES[dtype].itemsize), numpy.uint8).tobytes()
        frame = frame_tensor(dtype, shape, checksum=zlib.crc32(content), multiple=64 if number % 2 else 4096)
        path = tmp_path / f"{number}.pt"
        path.write_bytes(frame.head + content + frame.tail)
        loaded = torch.load(path, weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape)) == (getattr(torch, dtype), shape)
        flat = loaded.reshape(-1)
        held = b"" if not flat.numel() else flat.untyped_storage()
        assert bytes(held) == content
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_a_written_pt_file_is_the_text_that_torch_writes(tmp_path: Path) -> None:
    for shape in SHAPES:
        tensor = torch.zeros(shape)
        torch.save(tensor, tmp_path / "theirs.pt")
        frame = frame_tensor("float32", shape, checksum=0, multiple=64)
        (tmp_path / "ours.pt").write_bytes(frame.head + bytes(tensor.nbytes) + frame.tail)
        theirs, ours = (zipfile.ZipFile(tmp_path / f"{name}.pt").read for name in ("theirs", "ours"))
        assert ours("archive/data.pkl") == theirs("theirs/data.pkl")


def test_an_object_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    growing = GrowingObject(path)
    assert strict(path) == {}
    for number in range(5):
        growing.add(str(number), [number])
        growing.add(f"{number}!", None)
        growing.flush()
        assert list(strict(path)) == [f"{n}{mark}" for n in range(number + 1) for mark in ("", "!")]
    growing.close()
    again = GrowingObject(path)
    again.add("after", {})
    again.flush()
    again.close()
    assert len(strict(path)) == 11
    path.write_bytes(object_text({"a": 1}))
    GrowingObject(path).close()
    path.write_bytes(b'{"a": 1')
    with pytest.raises(RunDamaged, match="nothing can be added"):
        GrowingObject(path)


def test_a_full_disk_leaves_the_object_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    growing = GrowingObject(path)
    growing.add("a", 1)
    growing.flush()
    true_write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: true_write(fd, data[:7] if len(data) > 7 else data, at))
    growing.add("b", 2)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        growing.flush()
    assert strict(path) == {"a": 1}
    monkeypatch.undo()
    growing.add("c", 3)
    growing.flush()
    growing.close()
    assert strict(path) == {"a": 1, "c": 3}


@pytest.mark.parametrize(
    ("dtype", "shape", "moments", "expected"),
    [
        ("float32", (3,), Moments(2.0, -1.0, 0.5, 2.25, 0, 0), [2.0, -1.0, 0.5, 2.25]),
        ("float32", (3,), Moments(2.0, 1.0, 1.5, 2.2, 1, 0), ["NaN"] * 4),
        ("bfloat16", (3,), Moments(2.0, 1.0, 0.015466, 25.306, 0, 0), [2.0, 1.0, 0.01544189453125, 25.25]),
        ("float16", (3,), Moments(6e4, 6e4, 6e4, 1.04e5, 0, 0), [6e4, 6e4, 6e4, float("inf")]),
        ("float32", (4,), Moments(0.0, -3e38, -1.5e38, 4.3e38, 0, 0), [0.0, -3e38, float("-inf"), float("inf")]),
        ("float64", (3,), Moments(2.0, 1.0, 0.1, 2.2, 0, 0), [2.0, 1.0, 0.1, 2.2]),
        ("float32", (3,), Moments(float("inf"), 1.0, 1.0, 1.0, 0, 1), [float("inf"), 1.0, float("inf"), float("inf")]),
        (
            "float32",
            (2,),
            Moments(float("inf"), float("-inf"), 1.0, 1.0, 0, 2),
            [float("inf"), float("-inf"), "NaN", float("inf")],
        ),
        ("int64", (3,), Moments(4.0, 1.0, 2.0, 4.6, 0, 0), [4, 1, None, None]),
        ("int64", (), Moments(-4.0, -4.0, -4.0, 4.0, 0, 0), [-4, -4, -4, 4]),
        ("bool", (2,), Moments(1.0, 0.0, 0.5, 1.0, 0, 0), [True, False, None, None]),
        ("complex64", (2,), Moments(1.0, 0.0, 0.5, 3.0, 0, 0), [None, None, None, 3.0]),
        ("float16", (0, 2), Moments(*[float("nan")] * 4, 0, 0), [None] * 4),
    ],
)
def test_statistics_are_as_the_older_tool_gives_them(
    dtype: str, shape: tuple[int, ...], moments: Moments, expected: list[Any], tmp_path: Path
) -> None:
    entry = tensor_entry(SlotEvent("input.0", dtype, shape, grad=True), moments)
    growing = GrowingObject(tmp_path / "x.json")
    growing.add("tensor", entry)
    growing.flush()
    growing.close()
    read = strict(tmp_path / "x.json")["tensor"]
    assert [read[key] for key in ("Max", "Min", "Mean", "Norm")] == expected
    assert read["requires_grad"] is True and read["dtype"] == f"torch.{dtype}"


def test_arguments_have_the_older_tool_s_words() -> None:
    tensors = {"input.1.0": {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2]}}
    tree = [
        1,
        [{"slot": "input.1.0"}, None],
        {"type": "tuple", "value": [True, "mean"]},
        {"type": "torch.Size", "value": [2, 3]},
        {"type": "slice", "value": [None, 2, None]},
        {"type": "ellipsis", "value": None},
        {"type": "torch.dtype", "value": "float16"},
        {"type": "float", "value": "NaN"},
        {"type": "dict", "value": {"a": 2.5}},
        {"type": "object", "value": "torch.Generator"},
        {"type": "tuple", "value": [2, {"slot": "input.1.0"}], "fields": ["size", "data"]},
    ]
    assert argument_entry(tree, tensors) == [
        {"type": "int", "value": 1},
        [tensors["input.1.0"], None],
        [{"type": "bool", "value": True}, {"type": "str", "value": "mean"}],
        {"type": "torch.Size", "value": [2, 3]},
        {"type": "slice", "value": [None, 2, None]},
        {"type": "ellipsis", "value": "..."},
        {"type": "torch.dtype", "value": "torch.float16"},
        {"type": "float", "value": "NaN"},
        {"a": {"type": "float", "value": 2.5}},
        None,
        {"size": {"type": "int", "value": 2}, "data": tensors["input.1.0"]},
    ]
    assert as_number(2.0) == 2.0


def test_places_become_lists_and_keys_become_objects() -> None:
    one, two = ({"type": "torch.Tensor", "dtype": "torch.float32", "shape": [n]} for n in (1, 2))
    tensors = {"input.0": one, "output.0": one, "output.2.1": two}
    whole = ("backward.input", "backward.output")
    assert backward_entry(tensors, whole, {}) == {"input": [one], "output": [one, None, [None, two]]}
    assert backward_entry(tensors, whole[:1], {}) == {"input": [one]}
    mixed = backward_entry({"output.0": one, "output.kwargs.w": two}, whole, {})
    assert mixed == {"input": [], "output": {"0": one, "kwargs": {"w": two}}}
    listed = {"input": ["input.0"], "output": ["output.0", "output.1", "output.2.1"]}
    assert backward_entry(tensors, whole, listed) == {"input": [one], "output": [one, None, two]}


def write_dump(folder: Path, count: int, **fields: Any) -> RunWriter:
    form = MsprobeTarget(str(folder), "tensor", "L1", **{"values": "pt", **fields})
    options, lock = msgspec.to_builtins(form), prepare_target(form)
    writer = RunWriter(folder, 0, keep_data=True, in_process=True, layout="msprobe", layout_options=options, lock=lock)
    writer.stack(0, [(__file__, 1, "here")])
    first = 0 if not form.continued else count
    for number in range(first, first + count):
        array = numpy.full((2, 3), number, numpy.float32)
        call(
            writer,
            f"Tensor.add.{number}.forward",
            slot(writer, "input.0", array),
            slot(writer, "output.0", array),
            args=[{"slot": "input.0"}, float(number)],
            stack=0,
        )
    return writer


def test_a_dump_is_read_back_and_can_be_continued(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank3"
    assert close(write_dump(folder, 4, digests=True)) is None
    assert close(write_dump(folder, 4, digests=True, continued=True)) is None
    run = open_run(tmp_path)
    assert [found.name for found in run.calls(0, 3)] == [f"Tensor.add.{n}.forward" for n in range(8)]
    found = run.call("Tensor.add.5.forward")
    assert found.outputs[0].numpy().tolist() == [[5.0] * 3] * 2
    assert found.args == [{"slot": "input.0"}, 5.0]
    stack = run.stack(found)
    assert stack is not None and stack.frames[0].function == "here"
    stacks = strict(folder / "stack.json")
    assert list(stacks) == ["0"] and len(stacks["0"][0]) == 8
    entry = strict(folder / "dump.json")["data"]["Tensor.add.1.forward"]["output"][0]
    assert entry["md5"] == f"{zlib.crc32(numpy.full(6, 1, numpy.float32).tobytes()):08x}"
    assert entry["data_name"] == "Tensor.add.1.forward.output.0.pt"
    values = folder / "dump_tensor_data"
    assert (values / entry["data_name"]).samefile(values / "Tensor.add.1.forward.input.0.pt")


def test_equal_tensors_are_written_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert close(write_dump(tmp_path / "step0" / "rank0", 2, values="npy")) is None
    found = open_run(tmp_path).call("Tensor.add.1.forward")
    assert [held.numpy().tolist() for held in found.slots] == [[[1.0] * 3] * 2] * 2


def test_what_an_earlier_dump_left_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank0"
    close(write_dump(folder, 3))
    close(write_dump(folder, 1, values=None))
    assert not (folder / "dump_tensor_data").exists()
    assert list(strict(folder / "dump.json")["data"]) == ["Tensor.add.0.forward"]
    assert strict(folder / "dump.json")["dump_data_dir"] is None


def test_files_that_are_no_dump_s_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "dump_tensor_data").mkdir()
    (tmp_path / "dump_tensor_data" / "notes.txt").write_text("mine")
    with pytest.raises(RunExists, match=r"notes\.txt"):
        prepare_target(MsprobeTarget(str(tmp_path), "tensor", "L1", values="pt"))


def test_a_file_that_cannot_be_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write_dump(tmp_path / "step0" / "rank0", 0)
    (tmp_path / "step0" / "rank0" / "dump_tensor_data").rmdir()
    array = numpy.zeros(3, numpy.float32)
    call(writer, "Tensor.add.0.forward", slot(writer, "output.0", array), args=[])
    close(writer)
    assert writer.part is not None
    assert "dump_tensor_data/*.pt: No such file or directory (1 times)" in writer.part.coverage.notes
    entry = strict(tmp_path / "step0" / "rank0" / "dump.json")["data"]["Tensor.add.0.forward"]
    assert "data_name" not in entry["output"][0]


def test_layouts_of_memory_become_rows(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank0"
    writer = write_dump(folder, 0, digests=True)
    block = numpy.arange(6, dtype=numpy.float32)
    fields = slot(writer, "output.0", block)
    fields.shape, fields.stride = (2, 3), (1, 2)  # the block is the transposed one
    call(writer, "Tensor.t.0.forward", fields, args=[])
    close(writer)
    expected = block.reshape(3, 2).T
    found = open_run(tmp_path).call("Tensor.t.0.forward").outputs[0]
    assert found.numpy().tolist() == expected.tolist()
    entry = strict(folder / "dump.json")["data"]["Tensor.t.0.forward"]["output"][0]
    assert entry["md5"] == f"{zlib.crc32(expected.tobytes()):08x}"

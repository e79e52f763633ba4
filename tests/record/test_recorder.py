"""The recorder's end: files of each step, equal bytes once, limits, lines only after their bytes, and what a death leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy
import pytest

from tensorprobe.errors import NoData
from tensorprobe.record import open_run
from tensorprobe.record.blob_writer import BlobWriter, make_buffers
from tensorprobe.record.tensor_store import TensorStore
from tests.record.writing import call, close, slot, start_writer

DIRECT = [True, False]


def test_each_step_has_its_files(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    for step in (0, 3):
        writer.step(step)
        writer.stack(0, [(__file__, 1, "test")])
        call(writer, "Torch.sin.0.forward", slot(writer, "input.0", numpy.full(2, float(step))), stack=0)
    writer.step(4)
    assert close(writer) is None
    run = open_run(tmp_path)
    assert run.steps == [0, 3]
    assert run.parts[0].steps == [0, 3]
    for step in (0, 3):
        (found,) = run.calls(step=step)
        assert found.slots[0].numpy().tolist() == [step, step]
        stack = run.stack(found)
        assert stack is not None
        assert stack.frames[0].code.startswith('"""The recorder')


def test_equal_bytes_are_written_once_in_a_step(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    same = numpy.arange(1000.0)
    for number in range(5):
        call(
            writer,
            f"Torch.sin.{number}.forward",
            slot(writer, "input.0", same),
            slot(writer, "output.0", same + number),
        )
    assert close(writer) is None
    offsets = {stored.slots[0].offset for stored in open_run(tmp_path).calls()}
    assert len(offsets) == 1
    size = (tmp_path / "step0" / "rank0" / "tensors.bin").stat().st_size
    assert 5 * same.nbytes <= size < 6 * same.nbytes


@pytest.mark.parametrize("ring_bytes", [16 << 20, 1 << 20], ids=["whole", "in pieces"])
def test_limit_of_bytes_holds_and_is_told(ring_bytes: int, tmp_path: Path) -> None:
    writer = start_writer(tmp_path, max_bytes=2_000_000, ring_bytes=ring_bytes)
    for number in range(4):
        call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", numpy.full(100_000, float(number))))
    assert close(writer, recorded=4) is None
    run = open_run(tmp_path)
    found = [stored.slots[0] for stored in run.calls()]
    assert [slot.has_data for slot in found] == [True, True, False, False]
    assert all(slot.summary is not None and slot.summary.max == number for number, slot in enumerate(found))
    assert run.coverage[0].bytes_written <= 2_000_000
    assert [note for note in run.coverage[0].notes if "max_bytes reached" in note]


def test_without_values_there_is_no_file_for_them(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, keep_data=False)
    call(writer, "Torch.sin.0.forward", slot(writer, "input.0", numpy.arange(3.0)))
    assert close(writer) is None
    (found,) = open_run(tmp_path).calls()
    assert found.slots[0].summary is not None
    with pytest.raises(NoData):
        found.slots[0].numpy()
    assert not (tmp_path / "step0" / "rank0" / "tensors.bin").exists()


def test_summaries_of_a_tensor_in_pieces_are_those_of_the_whole(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    array = random.standard_normal(400_000)
    array[[5, 399_999]] = numpy.nan, numpy.inf
    writer = start_writer(tmp_path, ring_bytes=1 << 20)
    call(writer, "Torch.sin.0.forward", slot(writer, "input.0", array))
    assert close(writer) is None
    (found,) = open_run(tmp_path).calls()
    summary = found.slots[0].summary
    assert summary is not None
    finite = array[numpy.isfinite(array)]
    assert (summary.nan, summary.inf, summary.min) == (1, 1, finite.min())
    assert summary.mean == pytest.approx(finite.mean())
    assert summary.norm == pytest.approx(numpy.linalg.norm(finite))


def test_lines_are_standard_json_and_leave_defaults_out(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    call(writer, "Torch.sin.0.forward", slot(writer, "input.0", numpy.array([numpy.nan, -numpy.inf])))
    assert close(writer) is None
    raw = (tmp_path / "step0" / "rank0" / "calls.jsonl").read_bytes()
    assert raw.endswith(b"\n")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no standard JSON")

    line = json.loads(raw, parse_constant=refuse)
    assert set(line) == {"name", "slots"}
    assert line["slots"][0]["summary"][:2] == ["-Infinity", "-Infinity"]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_recorder_writes_all_that_was_handed_over_when_the_trainer_is_gone(tmp_path: Path) -> None:
    """The pipe ends without a word of farewell: what is half-told is dropped, the rest is there, and the run is not closed."""
    child = os.fork()
    if child == 0:
        try:
            writer = start_writer(tmp_path)
            for number in range(10):
                call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", numpy.full(50, float(number))))
            os.write(writer._pipe.fd, (1000).to_bytes(4, "little") + b"half a frame")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    run = open_run(tmp_path)
    assert not run.closed
    assert [stored.slots[0].numpy()[0] for stored in run.calls()] == list(range(10))


@pytest.mark.parametrize("direct", DIRECT)
def test_blob_gives_back_what_was_appended(direct: bool, tmp_path: Path) -> None:
    blob = BlobWriter(tmp_path / "blob", direct=direct)
    places = []
    for number in range(300):
        data = bytes([number % 256]) * (number * 331 % 100_000 + 1)
        places.append((blob.append(memoryview(data)), data))
        if number % 50 == 0:
            blob.flush()
            content = (tmp_path / "blob").read_bytes()
            assert all(content[offset : offset + len(bytes_)] == bytes_ for offset, bytes_ in places)
    blob.close()
    content = (tmp_path / "blob").read_bytes()
    assert len(content) == blob.written_to
    for offset, data in places:
        assert offset % 64 == 0
        assert content[offset : offset + len(data)] == data


@pytest.mark.parametrize("direct", DIRECT)
def test_blob_forgets_what_it_is_told_to_unless_it_left_the_buffer(direct: bool, tmp_path: Path) -> None:
    blob = BlobWriter(tmp_path / "blob", direct=direct)
    first = blob.append(memoryview(b"a" * 100))
    second = blob.append(memoryview(b"b" * 100))
    assert blob.rewind(second)
    assert blob.append(memoryview(b"c" * 10)) == second
    blob.append(memoryview(bytes(20 << 20)))
    assert not blob.rewind(first)
    blob.close()
    assert (tmp_path / "blob").read_bytes()[second : second + 11] == b"c" * 10 + b"\0"


def test_store_on_a_broken_disk_goes_on_without_values(tmp_path: Path) -> None:
    (tmp_path / "step0").write_text("a file where a folder should be")
    store = TensorStore(keep_data=True, max_bytes=None, direct=True)
    store.open_in(tmp_path / "step0" / "rank0")
    assert store.store(memoryview(b"abc"), "digest") is None
    assert store.begin() is None
    store.extend(memoryview(b"abc"))
    assert store.end(None, "digest", 3) is None
    store.flush()
    store.close()
    assert sum(store.failures.values()) == 1
    store.open_in(tmp_path / "step1" / "rank0")
    assert store.store(memoryview(b"abc"), "digest") == 0
    store.close()
    assert (tmp_path / "step1" / "rank0" / "tensors.bin").read_bytes()[:3] == b"abc"


@pytest.mark.parametrize("direct", DIRECT)
def test_buffers_serve_one_file_after_the_other(direct: bool, tmp_path: Path) -> None:
    buffers = make_buffers()
    for name, size in (("first", 9_000_000), ("second", 100), ("third", 17_000_001)):
        blob = BlobWriter(tmp_path / name, direct=direct, buffers=buffers)
        blob.append(memoryview(name.encode() * size))
        blob.append(memoryview(b"end"))
        blob.close()
        start = len(name) * size
        padded = b"\0" * (-start % 64)
        assert (tmp_path / name).read_bytes() == name.encode() * size + padded + b"end".ljust(64, b"\0")

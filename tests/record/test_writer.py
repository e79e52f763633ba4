"""The trainer's end: what was put and called is on disk after close, in order, whatever the threads, sizes and failures."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy
import pytest

from tensorprobe.model.event import SlotEvent
from tensorprobe.record import open_run
from tensorprobe.record import writer as writer_module
from tensorprobe.record.writer import RunWriter
from tests.record.writing import call, close, put, slot, start_writer

KINDS = {"process": False, "thread": True}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_come_out_as_they_went_in(kind: str, tmp_path: Path) -> None:
    writer = start_writer(tmp_path, in_process=KINDS[kind])
    arrays = [numpy.arange(n, dtype="float32") for n in (0, 1, 7, 64, 1000)]
    for number, array in enumerate(arrays):
        call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", array), args=[{"slot": "input.0"}, number])
    assert close(writer, seen=5, recorded=5) is None
    run = open_run(tmp_path)
    assert run.closed
    for number, (found, array) in enumerate(zip(run.calls(), arrays, strict=True)):
        assert found.args == [{"slot": "input.0"}, number]
        assert numpy.array_equal(found.slots[0].numpy(), array)
        assert found.slots[0].summary is not None
        assert found.slots[0].nbytes == array.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_go_round_a_small_ring_many_times(kind: str, tmp_path: Path) -> None:
    writer = start_writer(tmp_path, ring_bytes=1 << 20, in_process=KINDS[kind])
    sizes = [(37 * number * number) % 190_000 + 1 for number in range(80)] + [900_000, 5, 262_144, 262_145]
    for number, size in enumerate(sizes):
        array = numpy.full(size, number % 256, dtype="uint8")
        array[-1] = 255 - number % 256
        call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", array))
    assert close(writer) is None
    found = list(open_run(tmp_path).calls())
    assert len(found) == len(sizes)
    for number, (stored, size) in enumerate(zip(found, sizes, strict=True)):
        values = stored.slots[0].numpy()
        assert values.shape == (size,)
        assert (values[:-1] == number % 256).all()
        assert values[-1] == 255 - number % 256


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_run_can_be_watched(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(writer_module, "close_watch", lambda done, total: said.append((done, total)))
    monkeypatch.setattr(writer_module, "_SHOWN_S", 0.001)
    writer = start_writer(tmp_path, in_process=KINDS[kind])
    for number in range(20):
        call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", numpy.full(500_000, float(number))))
    assert close(writer) is None
    *before, last = said
    assert before == sorted(before) and all(done < total for done, total in before)
    assert last[0] == last[1] > 0
    assert len(open_run(tmp_path).names(0, 0)) == 20


def test_threads_write_side_by_side(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, ring_bytes=1 << 20)

    def write(thread: int) -> None:
        for number in range(150):
            array = numpy.full(400 + number, thread * 1000 + number, dtype="int32")
            call(writer, f"Torch.t{thread}.{number}.forward", slot(writer, "input.0", array))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert close(writer) is None
    found = {stored.name: stored.slots[0].numpy() for stored in open_run(tmp_path).calls()}
    assert len(found) == 600
    for thread in range(4):
        for number in range(150):
            values = found[f"Torch.t{thread}.{number}.forward"]
            assert values.size == 400 + number
            assert (values == thread * 1000 + number).all()


def test_event_that_cannot_be_encoded_harms_no_other(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    lost = slot(writer, "input.0", numpy.full(3, 1.0))
    with pytest.raises((TypeError, UnicodeEncodeError)):
        call(writer, "Torch.lost.0.forward", lost, args=[object()])
    call(writer, "Torch.kept.0.forward", slot(writer, "input.0", numpy.full(3, 2.0)))
    assert close(writer) is None
    (kept,) = open_run(tmp_path).calls()
    assert kept.slots[0].numpy().tolist() == [2, 2, 2]


def test_dropped_tensors_are_forgotten(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    tokens = [put(writer, numpy.full(3, float(number))) for number in range(3)]
    writer.drop(tokens[:2])
    call(writer, "Torch.sin.0.forward", SlotEvent("input.0", "float64", (3,), token=tokens[2]))
    assert close(writer) is None
    (found,) = open_run(tmp_path).calls()
    assert found.slots[0].numpy().tolist() == [2, 2, 2]


def test_call_after_close_is_dropped_and_touches_no_file(tmp_path: Path) -> None:
    writer = start_writer(tmp_path / "run")
    pipe = writer._pipe.fd
    assert close(writer) is None
    victim = os.open(tmp_path / "victim", os.O_CREAT | os.O_RDWR)
    os.dup2(victim, pipe)
    try:
        call(writer, "Torch.late.0.forward", slot(writer, "input.0", numpy.ones(3)))
        writer.step(5)
    finally:
        os.close(pipe)
        if victim != pipe:
            os.close(victim)
    assert (tmp_path / "victim").read_bytes() == b""
    assert open_run(tmp_path / "run").steps == []


@pytest.mark.process
def test_nothing_is_raised_when_the_recorder_is_gone(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, ring_bytes=1 << 20)
    os.kill(writer.recorder_pid, signal.SIGKILL)
    for number in range(30):
        call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", numpy.ones(100_000)))
    assert writer.failure is not None
    assert "the recorder has ended" in writer.failure
    assert close(writer) == writer.failure


def test_training_waits_while_the_ring_is_full_and_no_longer(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, ring_bytes=1 << 20)
    for number in range(40):
        call(writer, f"Torch.sin.{number}.forward", slot(writer, "input.0", numpy.full(30_000, float(number))))
    assert writer.waited_s > 0
    assert close(writer) is None
    assert len(open_run(tmp_path).names(0, 0)) == 40


@pytest.mark.process
def test_memory_of_the_ring_is_given_back(tmp_path: Path) -> None:
    def mapped() -> int:
        return sum("tensorprobe" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    writer = start_writer(tmp_path)
    assert mapped() == before + 1
    assert close(writer) is None
    assert mapped() == before


def test_writer_has_room_for_a_quarter_of_the_ring_in_one_piece(tmp_path: Path) -> None:
    writer: RunWriter = start_writer(tmp_path, ring_bytes=(1 << 20) + 100)
    _, size, largest = writer.ring
    assert size == 1 << 20
    assert largest * 4 == size
    assert close(writer) is None

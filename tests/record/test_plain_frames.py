"""Frames that are recorded in C give the record that Python makes of them: the same bytes in every file."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.model.dtypes import BY_CODE, DTYPES
from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.model.level import Level
from tensorprobe.record import plain_frames, recorder
from tensorprobe.record.messages import CloseNote, DropNote, EndNote, Orders, Piece, StackNote, StepNote
from tensorprobe.record.recorder import Recorder
from tensorprobe.record.ring import Ring, aligned
from tensorprobe.record.tensor_store import TensorStore

NATIVE = plain_frames.load()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C code is not built")
RING_BYTES = 8 << 20
encode = msgspec.msgpack.Encoder().encode


class Tape:
    """What a trainer sends: the ring's content, and the frames."""

    def __init__(self, ring_bytes: int = RING_BYTES) -> None:
        self.size, self.content, self.frames = ring_bytes, bytearray(ring_bytes), b""
        self.head = self.tokens = 0
        self.pieces: list[Piece] = []

    def put(self, data: bytes, dtype: int, *, cut: int = 0) -> int:
        """Put a tensor, in two pieces if `cut` says where; its token."""
        for part, last in ((data[:cut], False), (data[cut:], True)) if cut else ((data, True),):
            if self.head + len(part) > self.size:
                self.head = 0
            self.content[self.head : self.head + len(part)] = part
            self.pieces.append(Piece(self.head, len(part), dtype, last))
            self.head += aligned(len(part))
        self.tokens += 1
        return self.tokens - 1

    def send(self, *fields: Any) -> None:
        body = encode((self.pieces, *fields))
        self.pieces = []
        self.frames += len(body).to_bytes(4, "little") + body


def record(tape: Tape, *, native: bool, keep_data: bool = True, max_bytes: int | None = None) -> dict[str, bytes]:
    """The files that a recorder makes of a tape; the fields of its part that say how it went."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as pipe:
        run = Path(folder) / "run"
        run.mkdir()
        (run / "manifest.json").write_text("{}")
        pipe.write(tape.frames)
        pipe.seek(0)
        ring = Ring(tape.size)
        ring.view(0, tape.size)[:] = tape.content
        orders = Orders(str(run), 0, os.getpid(), -1, tape.size, pipe.fileno(), -1, keep_data, max_bytes, direct=False)
        with patch.object(recorder, "load", plain_frames.load if native else lambda: None):
            working = Recorder(orders, ring)
        assert (working._plain is not None) is native
        working.run()
        files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
        files["left"] = repr((sorted(working._stored.items()), working._tokens[0], ring.consumed)).encode()
        return files


def assert_same(tape: Tape, **settings_: Any) -> dict[str, bytes]:
    expected = record(tape, native=False, **settings_)
    found = record(tape, native=True, **settings_)
    assert found == expected
    return found


def python_frames(tape: Tape) -> int:
    """How many frames C leaves to Python."""
    left = 0

    def count(self: Recorder, batch: list[Any]) -> None:
        nonlocal left
        left += len(batch)
        plain(self, batch)

    plain = Recorder._take_frames
    with patch.object(Recorder, "_take_frames", count):
        record(tape, native=True)
    return left


TEXTS = st.one_of(
    st.sampled_from(["", "cpu", "npu:0", "layers.0.attn", 'a "quoted" \\ name', "Ü 层"]), st.text(max_size=8)
)
WHOLES = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2), st.sampled_from([2**63, 2**64 - 1, 128, -33]))
LEAVES = st.one_of(st.none(), st.booleans(), WHOLES, st.floats(), TEXTS, st.builds(lambda name: {"slot": name}, TEXTS))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(TEXTS, inner, max_size=17)),
    max_leaves=30,
)
SMALL = st.integers(0, 3)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[bytes, int]:
    dtype = draw(st.integers(0, len(BY_CODE) - 1))
    size = BY_CODE[dtype].itemsize
    data = draw(
        st.one_of(st.binary(max_size=40 * size), st.sampled_from([bytes(16), b"\xff" * 32, b"\x00\x00\x80\x7f" * 4]))
    )
    return data[: len(data) // size * size], dtype


@st.composite
def slots(draw: st.DrawFn, tape: Tape, open_tokens: list[int]) -> SlotEvent:
    slot = SlotEvent(
        draw(TEXTS),
        draw(TEXTS),
        tuple(draw(st.lists(WHOLES.filter(lambda n: n < 2**63), max_size=3))),
        **draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "device": TEXTS,
                    "stride": st.lists(st.integers(0, 300), max_size=3).map(tuple),
                    "grad": st.booleans(),
                    "skipped": TEXTS,
                    "written": st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9**9)), max_size=2).map(tuple),
                    "role": TEXTS,
                },
            )
        ),
    )
    how = draw(st.sampled_from(["new", "new", "new", "open", "none", "device"]))
    if how == "new":
        slot.token = tape.put(*draw(tensors()))
    elif how == "open" and open_tokens:
        slot.token = open_tokens.pop(draw(st.integers(0, len(open_tokens) - 1)))
    elif how == "device":
        slot.summary = (1.0, 0.0, math.inf, math.nan, 0, 1)
    return slot


@st.composite
def tapes(draw: st.DrawFn) -> Tape:
    tape, open_tokens = Tape(), list[int]()
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["call", "call", "call", "call", "pieces", "note", "cut"]))
        if draw(SMALL) == 0:
            open_tokens.append(tape.put(*draw(tensors())))
        if kind == "call":
            more = draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "level": st.sampled_from(Level),
                        "module": TEXTS,
                        "parent": TEXTS,
                        "origin": TEXTS,
                        "stack": SMALL,
                        "thread": SMALL,
                        "repeat": SMALL,
                        "phase": TEXTS,
                        "microbatch": SMALL,
                        "raised": TEXTS,
                        "args": TREES,
                        "kwargs": TREES,
                    },
                )
            )
            event = Event(draw(TEXTS), **more)
            event.slots = [draw(slots(tape, open_tokens)) for _ in range(draw(SMALL))]
            tape.send(event)
        elif kind == "pieces":
            tape.send(*draw(st.sampled_from([(), (None,), (None, None)])))
        elif kind == "cut":
            data = draw(st.binary(min_size=16, max_size=64))
            open_tokens.append(tape.put(data[: len(data) // 8 * 8], DTYPES["float32"].code, cut=8))
        elif open_tokens and draw(st.booleans()):
            tape.send(None, DropNote([open_tokens.pop()]))
        else:
            notes = [StepNote(draw(SMALL)), EndNote(0), StackNote(0, [(__file__, 1, "f")])]
            tape.send(None, draw(st.sampled_from(notes)))
    if draw(st.booleans()):
        tape.send(None, CloseNote({"seen": 0}, {}, "cpu"))
    if draw(st.booleans()):
        tape.frames += b"\x10\0\0\0half"
    return tape


@settings(max_examples=300, deadline=None)
@given(tapes(), st.booleans(), st.one_of(st.none(), st.integers(0, 300)))
def test_any_frames_give_the_record_that_python_makes(tape: Tape, keep_data: bool, max_bytes: int | None) -> None:
    assert_same(tape, keep_data=keep_data, max_bytes=max_bytes)


def test_a_plain_call_is_recorded_in_c() -> None:
    tape = Tape()
    token = tape.put(struct.pack("<3f", 1, math.nan, -math.inf), DTYPES["float32"].code)
    slot = SlotEvent("input.0", "float32", (3,), stride=(1,), grad=True, token=token, role="parameter a.b")
    tree = [{"slot": "input.0"}, 1.5, {"type": "tuple", "value": [1, -1, None, True, 'a "name"\n']}]
    tape.send(Event("Torch.sin.0.forward", module="a", stack=3, args=tree, kwargs={}, slots=[slot]))
    assert python_frames(tape) == 0
    line = json.loads(assert_same(tape)["step0/rank0/calls.jsonl"])
    assert line["args"] == tree
    assert line["slots"][0]["summary"] == [1.0, "-Infinity", 1.0, 1.0, 1, 1]


def test_a_tensor_that_comes_before_its_call_is_remembered() -> None:
    tape = Tape()
    outer = tape.put(struct.pack("<f", 7), DTYPES["float32"].code)
    inner = tape.put(b"", DTYPES["float32"].code)
    tape.send(Event("Torch.sin.0.forward", slots=[SlotEvent("input.0", "float32", (0,), token=inner)]))
    tape.send(
        Event("Module.a.A.forward.0", level=Level.MODULE, slots=[SlotEvent("input.0", "float32", (), token=outer)])
    )
    assert python_frames(tape) == 0
    lines = assert_same(tape)["step0/rank0/calls.jsonl"].splitlines()
    assert json.loads(lines[1])["slots"][0]["summary"][0] == 7


@pytest.mark.parametrize("nbytes", [256 * 1024, 256 * 1024 + 4, 5 << 20])
def test_large_tensors_and_full_buffers_are_stored_as_python_stores_them(nbytes: int) -> None:
    tape = Tape(64 << 20)
    for number in range(max(6, (20 << 20) // nbytes)):
        data = bytes([number]) * nbytes
        slot = SlotEvent("input.0", "uint8", (nbytes,), token=tape.put(data, DTYPES["uint8"].code))
        again = SlotEvent("output.0", "uint8", (4,), token=tape.put(b"same", DTYPES["uint8"].code))
        tape.send(Event(f"Torch.sin.{number}.forward", slots=[slot, again]))
    assert (python_frames(tape) == 0) == (nbytes == 256 * 1024)
    assert len(assert_same(tape)["step0/rank0/tensors.bin"]) > 19 << 20


def test_a_broken_disk_leaves_the_same_lines() -> None:
    tape = Tape(16 << 20)
    for number in range(40):
        data = bytes([number]) * 250_000
        slot = SlotEvent("input.0", "uint8", (250_000,), token=tape.put(data, DTYPES["uint8"].code))
        tape.send(Event(f"Torch.sin.{number}.forward", slots=[slot]))

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with patch("os.pwrite", fail):
        found = assert_same(tape)["step0/rank0/calls.jsonl"]
    assert found.count(b"\n") == 40
    assert b"offset" not in found


def test_a_buffer_is_not_touched_once_the_disk_broke_within_a_call() -> None:
    tape = Tape(64 << 20)
    for number, tensors in enumerate((1, 240)):
        slots = []
        for at in range(tensors):
            token = tape.put(struct.pack("<2I", number, at) * 31_250, DTYPES["uint8"].code)
            slots.append(SlotEvent(f"input.{at}", "uint8", (250_000,), token=token))
        tape.send(Event(f"Torch.sin.{number}.forward", slots=slots))
    dropped: list[tuple[array[int], array[int]]] = []

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    def drop(self: TensorStore, error: OSError) -> None:
        if self._blob is not None:
            dropped.append((self._blob.state, self._blob.state[:]))
        plain(self, error)

    plain = TensorStore._fail
    with patch("os.pwrite", fail), patch.object(TensorStore, "_fail", drop):
        record(tape, native=True)
    assert dropped and all(state == then for state, then in dropped)


@settings(max_examples=2000, deadline=None)
@given(
    st.one_of(
        st.floats(allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
)
def test_numbers_are_written_as_msgspec_writes_them(number: float) -> None:
    assert NATIVE is not None
    assert NATIVE.json_of(number, plain_frames.powers_of_ten()) == msgspec.json.encode(number)


def test_every_power_of_two_and_of_ten_is_written_as_msgspec_writes_it() -> None:
    assert NATIVE is not None
    powers = plain_frames.powers_of_ten()
    bits = [
        struct.unpack("<q", struct.pack("<d", math.ldexp(1, k)))[0] + d for k in range(-1074, 1024) for d in (-1, 0, 1)
    ]
    numbers = (
        list(array("d", struct.pack(f"<{len(bits)}q", *bits))) if struct.pack("=i", 1) == struct.pack("<i", 1) else []
    )
    numbers += [float(f"{digit}e{k}") for k in range(-323, 308) for digit in ("1", "5", "9.5", "1.2345678901234567")]
    wrong = [number for number in numbers if NATIVE.json_of(number, powers) != msgspec.json.encode(number)]
    assert wrong == []

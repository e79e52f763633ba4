"""Runs the C code of the recorder, built with sanitizers, over frames, whole and damaged; tools/sanitize.sh starts it.

    exercise_frames.py FRAMES.so              everything; exits non-zero when a line or a byte is wrong
    exercise_frames.py FRAMES.so --overread   a ring that says it is longer than it is: the sanitizer must end the process

The ring and the buffer of values stand in blocks of exactly their size from the allocator of the sanitizer.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from array import array
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import msgspec

from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.numerics.summary import Moments, digest
from tensorprobe.record.messages import Piece
from tensorprobe.record.plain_frames import powers_of_ten
from tensorprobe.record.step_files import Stored

RING_BYTES = 1 << 16
BUFFER_BYTES = 1 << 12
DTYPES = 21

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
encode = msgspec.msgpack.Encoder().encode


class Memory:
    """A ring of random bytes with its header, a buffer for values, and a recorder on them."""

    def __init__(self, native: ModuleType, *, ring_bytes: int = RING_BYTES, keep_data: bool = True) -> None:
        self.native = native
        self.content = random.Random(0).randbytes(RING_BYTES)
        self.ring, self.buffer = libc.malloc(RING_BYTES), libc.malloc(BUFFER_BYTES)
        ctypes.memmove(self.ring, self.content, RING_BYTES)
        self.tokens, self.header = array("q", [0]), array("q", [0, 0])
        self.state, self.offsets = array("q", [self.buffer, 0, 0]), dict[tuple[str, int], int]()
        self.stored: dict[int, Stored] = {}
        self.given: list[bytes] = []
        self.recorder = native.recorder(*self.arguments(ring_bytes, keep_data))

    def arguments(self, ring_bytes: int, keep_data: bool) -> list[Any]:
        places = (self.ring, ring_bytes, self.header.buffer_info()[0], BUFFER_BYTES)
        tokens = (self.tokens, self.tokens.buffer_info()[0])
        return [self.stored, *tokens, digest, self.store, Moments, Stored, *places, keep_data, powers_of_ten()]

    def store(self, view: memoryview, digest: str) -> int | None:
        """What Python does when the buffer is full: here it forgets the content and goes on with an empty one."""
        self.given.append(bytes(view))
        self.state[2] += self.state[1]
        self.state[1] = 0
        return None if len(self.given) % 3 == 0 else 64 * len(self.given)

    def take(self, data: bytes, blob: bool = True) -> tuple[int, list[bytes]]:
        opened = (self.state.buffer_info()[0], self.offsets) if blob else None
        at, lines, calls = self.native.take(self.recorder, bytearray(data), 0, opened, 2**62)
        demand(len(lines.splitlines()) == calls, "the number of calls")
        return at, lines.splitlines()


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"wrong: {what}")


def frame(*fields: Any) -> bytes:
    body = encode(fields)
    return len(body).to_bytes(4, "little") + body


def random_call(rng: random.Random, first: int) -> tuple[list[Piece], Event]:
    """A call with tensors anywhere in the ring, up to its last byte."""
    pieces = []
    for _ in range(rng.randrange(4)):
        nbytes = rng.choice([0, 16, 48, 1024, 4080, 8192])
        at = rng.choice([rng.randrange(RING_BYTES - nbytes), RING_BYTES - nbytes])
        pieces.append(Piece(at + RING_BYTES * rng.randrange(3), nbytes, rng.randrange(DTYPES), True))
    slots = [SlotEvent(f"input.{i}", "x", (i, 300), stride=(1, 2**40), token=first + i) for i in range(len(pieces))]
    tree = [{"slot": "input.0"}, rng.random(), -(2**63), 2**62, 'a\n"b', [None, True, False], {"k": 1e300}]
    return pieces, Event(
        f"Torch.sin.{first}.forward", module="m" * rng.randrange(300), args=tree * rng.randrange(3), slots=slots
    )


def check_calls(native: ModuleType) -> int:
    memory, rng, taken = Memory(native), random.Random(1), 0
    for _ in range(2000):
        pieces, event = random_call(rng, memory.tokens[0])
        data = frame(pieces, event)
        at, (line,) = memory.take(data, blob=rng.random() < 0.9)
        found = json.loads(line)
        demand(
            at == len(data) and found["name"] == event.name and (found.get("args") or None) == (event.args or None),
            "a line",
        )
        for slot, piece in zip(found.get("slots", ()), pieces, strict=True):
            start = piece.position % RING_BYTES
            content = memory.content[start : start + piece.nbytes]
            demand(slot["digest"] == digest(content) and slot["nbytes"] == piece.nbytes, "a digest")
            offset = slot.get("offset", -1) - memory.state[2]
            if (
                piece.nbytes
                and offset >= 0
                and offset + piece.nbytes <= memory.state[1]
                and content not in memory.given
            ):
                demand(ctypes.string_at(memory.buffer + offset, piece.nbytes) == content, "bytes in the buffer")
        taken += len(pieces)
    return taken


def check_kept_for_later(native: ModuleType) -> None:
    memory = Memory(native, keep_data=False)
    at, lines = memory.take(frame([Piece(0, 8, 0, True), Piece(64, 8, 0, True)], None) + frame([Piece(0, 8, 0, True)]))
    demand((at, lines, memory.stored) == (0, [], {}), "a frame with a null is left to Python")
    memory.take(frame([Piece(0, 8, 0, True), Piece(64, 8, 0, True)]))
    demand(set(memory.stored) == {0, 1}, "tensors for later")
    slot = SlotEvent("output.0", "float32", (2,), token=1)
    _, (line,) = memory.take(frame([], Event("Torch.cos.0.forward", slots=[slot])))
    demand("offset" not in json.loads(line)["slots"][0] and set(memory.stored) == {0}, "a tensor from before")
    for missing in (1, 7):
        slot.token = missing
        demand(
            refused(memory.take, frame([], Event("Torch.cos.1.forward", slots=[slot]))), "a tensor that is not there"
        )
    memory.stored[3] = (1, 2)  # type: ignore[assignment]
    slot.token = 3
    demand(refused(memory.take, frame([], Event("Torch.cos.1.forward", slots=[slot]))), "a tensor of another make")


def check_damaged(native: ModuleType) -> int:
    """Frames with bytes changed, cut or added: taken, left or refused, but never more than there is."""
    memory, rng, left = Memory(native), random.Random(2), 0
    for _ in range(20_000):
        data = bytearray(frame(*random_call(rng, memory.tokens[0])))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(4, len(data))] = rng.choice([rng.randrange(256), 0xC1, 0xDD, 0xDF, 0xDB, 0xCF, 0xFF])
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            at, _ = memory.take(bytes(data))
            left += at == 0
        except (KeyError, ValueError):
            left += 1
    return left


def refused(function: Callable[..., Any], *args: Any) -> bool:
    try:
        function(*args)
    except (KeyError, OverflowError, TypeError, ValueError):
        return True
    return False


def check_refusals(native: ModuleType) -> None:
    memory = Memory(native)
    for at, wrong in enumerate(memory.arguments(RING_BYTES, True)):
        if callable(wrong) or isinstance(wrong, (bool, array)):
            continue
        for instead in (None, -1, "text"):
            changed = memory.arguments(RING_BYTES, True)
            changed[at] = instead
            demand(refused(native.recorder, *changed), f"argument {at} of a recorder: {instead!r}")
    for wrong in [
        (None, bytearray(), 0, None, 0),
        (memory.recorder, b"", 0, None, 0),
        (memory.recorder, bytearray(), 1, None, 0),
    ]:
        demand(refused(native.take, *wrong), f"{wrong}")
    for blob in [(), (1,), (1, 2), "text"]:
        demand(refused(native.take, memory.recorder, bytearray(), 0, blob, 0), f"{blob}")
    demand(refused(native.json_of, float("nan"), powers_of_ten()) and refused(native.json_of, 1.0, b""), "numbers")


def load(path: str) -> ModuleType:
    loader = ExtensionFileLoader("_frames", path)
    spec = spec_from_loader("_frames", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def main() -> None:
    native = load(sys.argv[1])
    if "--overread" in sys.argv:
        Memory(native, ring_bytes=RING_BYTES + 64).take(frame([Piece(RING_BYTES - 15, 16, 5, True)]))
        sys.exit(0)
    taken, left = check_calls(native), check_damaged(native)
    check_kept_for_later(native)
    check_refusals(native)
    print(f"{taken} tensors taken, {left} damaged frames left")


if __name__ == "__main__":
    main()

"""The recorder: turns messages, and the bytes in the ring, into a run on disk.

It runs in a process of its own, without torch. So statistics, digests, JSON and the disk take no time from the training's
interpreter. When the trainer is killed, the recorder still writes every call that was handed over. Where a process cannot be
started, the same code runs in a thread of the trainer.

A line of `calls.jsonl` is written only after the bytes it names are in `tensors.bin`. The ring is drained even if the disk
fails, so that training never waits for a broken disk.
"""

from __future__ import annotations

import os
import struct
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Protocol

import msgspec

from tensorprobe.model.dtypes import BY_CODE
from tensorprobe.model.event import NO_TOKEN, Event
from tensorprobe.model.manifest import RankPart
from tensorprobe.numerics.summary import Moments, Row, RunningDigest, digest, join_moments, summarize_batch
from tensorprobe.record.apart import life_of
from tensorprobe.record.messages import (
    LENGTH_BYTES,
    CloseNote,
    DropNote,
    EndNote,
    Frame,
    Note,
    Orders,
    Piece,
    StackNote,
    StepNote,
)
from tensorprobe.record.plain_frames import PlainFrames, load
from tensorprobe.record.ring import Ring
from tensorprobe.record.step_files import RunPlace, StepFiles, Stored, write_all
from tensorprobe.record.tensor_store import TensorStore
from tensorprobe.registry import WRITERS

_READ_BYTES = 1 << 20
_GROUP_BYTES = 8 << 20
_PAUSE_S = 0.004
_ORPHAN_CHECK_S = 1.0
_AHEAD_BYTES = 48 << 20


class TensorFiles(Protocol):
    """Keeps the bytes of tensors. `TensorStore` is the one of our own layout."""

    wants_digest: bool

    def store(self, data: memoryview, digest: str) -> int | None:
        """Return the offset of these bytes; None if they are not kept."""

    def begin(self) -> int | None:
        """Start a tensor that comes in pieces."""

    def extend(self, data: memoryview) -> None:
        """Add a piece."""

    def end(self, offset: int | None, digest: str, nbytes: int) -> int | None:
        """End the tensor in pieces, and return its offset."""

    def discard(self, offset: int | None) -> None:
        """Note that no call names these bytes."""


class CallFiles(Protocol):
    """Writes calls in some layout. `StepFiles` is our own; others are in `tensorprobe.registry.WRITERS`."""

    @property
    def tensors(self) -> TensorFiles:
        """The store for bytes, which arrive before the call that names them."""

    def step(self, step: int) -> None:
        """Begin a step: the calls that follow belong to it."""

    def stack(self, note: StackNote) -> None:
        """Add a stack."""

    def call(self, event: Event, stored: list[Stored | None]) -> None:
        """Add a call; `stored` says what became of the bytes of each of its slots."""

    def flush(self) -> None:
        """Write what is waiting."""

    def finish(self, closing: CloseNote | None, trainer_pid: int) -> RankPart | None:
        """Write everything out. Return the part of a rank that ended normally."""


class Recorder:
    """Reads frames until the pipe ends, and writes them."""

    def __init__(self, orders: Orders, ring: Ring) -> None:
        self._orders = orders
        self._ring = ring
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._files = _open_files(orders)
        self._tensors = self._files.tensors
        self.part: RankPart | None = None
        self._stored: dict[int, Stored] = {}
        self._tokens = array("q", [0])
        """How many tensors have come."""
        self._partial: _PartialTensor | None = None
        self._closing: CloseNote | None = None
        self._populated = 0
        apart = os.getpid() != orders.trainer_pid
        self._trainer = life_of(orders.trainer_pid) if apart else None
        self._populating = ThreadPoolExecutor(1, thread_name_prefix="tensorprobe-ring") if apart else None
        native = load() if isinstance(self._files, StepFiles) else None
        self._plain: PlainFrames | None = None
        if native is not None and isinstance(self._files, StepFiles):
            self._plain = PlainFrames(native, self._files, ring, self._stored, self._tokens)

    def run(self) -> None:
        """Record until the trainer closes the run or is gone."""
        self._ring.begin_reading()
        try:
            self._read()
        finally:
            if self._populating is not None:
                self._populating.shutdown()
            self.part = self._files.finish(self._closing, self._orders.trainer_pid)

    def _read(self) -> None:
        """Record complete frames as they come. What a killed trainer left half-written at the end is dropped."""
        waiting = bytearray()
        pipe = self._orders.pipe_fd
        os.set_blocking(pipe, False)
        idle_s = 0.0
        while True:
            try:
                chunk = os.read(pipe, _READ_BYTES)
            except BlockingIOError:
                self._files.flush()
                if idle_s >= _ORPHAN_CHECK_S and self._is_orphan():
                    return
                idle_s += _PAUSE_S
            else:
                if not chunk:
                    return
                idle_s = 0.0
                waiting += chunk
                del waiting[: self._take(waiting)]
                if self._closing is not None:
                    return
                if len(chunk) > _READ_BYTES // 4:
                    continue
            # Never blocked in a read: a write of the trainer then wakes nobody, which would cost it more than the write.
            time.sleep(_PAUSE_S)

    def _take(self, waiting: bytearray) -> int:
        """Record the complete frames. Return how many bytes they are."""
        if self._plain is None:
            frames, at = self._decode(waiting, 0)
            self._take_frames(frames)
            return at
        at = 0
        while True:
            start = at
            if self._partial is None:
                at = self._plain.take(waiting, at)
                self._prepare(self._ring.consumed)
            if at == start:
                frames, at = self._decode(waiting, at, most=1)
                if not frames:
                    return at
                self._take_frames(frames)

    def _take_frames(self, batch: list[Frame]) -> None:
        for frames in _by_step(batch):
            self._take_pieces([piece for frame in frames for piece in frame.pieces])
            for frame in frames:
                if frame.call is not None:
                    self._take_call(frame.call)
                elif frame.note is not None:
                    self._take_note(frame.note)

    def _decode(self, waiting: bytearray, at: int, *, most: int | None = None) -> tuple[list[Frame], int]:
        """Return the complete frames from `at` on, at most so many, and where the next one begins."""
        frames: list[Frame] = []
        while at + LENGTH_BYTES <= len(waiting) and len(frames) != most:
            (length,) = struct.unpack_from("<I", waiting, at)
            end = at + LENGTH_BYTES + length
            if end > len(waiting):
                break
            frames.append(self._decoder.decode(bytes(waiting[at + LENGTH_BYTES : end])))
            at = end
        return frames, at

    def _is_orphan(self) -> bool:
        """Return whether the trainer is gone: its forked workers may hold the pipe open for ever."""
        return self._trainer is not None and not self._trainer()

    def _take_pieces(self, pieces: list[Piece]) -> None:
        """Store the tensors in groups, and free each group's place in the ring as soon as it is read."""
        group: list[Piece] = []
        group_bytes = 0
        for piece in pieces:
            if piece.last and self._partial is None:
                group.append(piece)
                group_bytes += piece.nbytes
                if group_bytes < _GROUP_BYTES:
                    continue
            self._store_whole(group)
            group, group_bytes = [], 0
            if not (piece.last and self._partial is None):
                self._store_part(piece)
        self._store_whole(group)

    def _store_whole(self, group: list[Piece]) -> None:
        if not group:
            return
        views = [self._ring.view(piece.position, piece.nbytes) for piece in group]
        for view, moments in zip(views, summarize_batch([self._row(piece) for piece in group]), strict=True):
            key = digest(view) if self._tensors.wants_digest else ""
            self._keep(Stored(moments, key, len(view), self._tensors.store(view, key)))
            view.release()
        self._give_back(group[-1])

    def _store_part(self, piece: Piece) -> None:
        """Store one piece of a tensor that is too large for the ring."""
        if self._partial is None:
            self._partial = _PartialTensor(self._tensors.begin())
        partial = self._partial
        view = self._ring.view(piece.position, piece.nbytes)
        row = self._row(piece)
        values = row[1] * (2 if BY_CODE[piece.dtype].kind == "complex" else 1)
        partial.moments.append((summarize_batch([row])[0], values))
        if self._tensors.wants_digest:
            partial.digest.update(view)
        partial.nbytes += piece.nbytes
        self._tensors.extend(view)
        view.release()
        self._give_back(piece)
        if piece.last:
            key = partial.digest.hexdigest()
            offset = self._tensors.end(partial.offset, key, partial.nbytes)
            self._keep(Stored(join_moments(partial.moments), key, partial.nbytes, offset))
            self._partial = None

    def _give_back(self, piece: Piece) -> None:
        """Free the ring up to this piece."""
        self._ring.consumed = piece.position + piece.nbytes
        self._prepare(piece.position)

    def _prepare(self, position: int) -> None:
        """If the trainer is about to use memory of the ring for the first time, have it allocated."""
        wanted = min(position + _AHEAD_BYTES, self._ring.size_bytes)
        if wanted > self._populated and self._populating is not None:
            self._populating.submit(self._ring.populate, self._populated, wanted - self._populated)
            self._populated = wanted

    def _row(self, piece: Piece) -> Row:
        address = self._ring.address + piece.position % self._ring.size_bytes
        return address, piece.nbytes // BY_CODE[piece.dtype].itemsize, piece.dtype

    def _keep(self, stored: Stored) -> None:
        self._stored[self._tokens[0]] = stored
        self._tokens[0] += 1

    def _take_call(self, event: Event) -> None:
        self._files.call(event, [None if s.token == NO_TOKEN else self._stored.pop(s.token) for s in event.slots])

    def _take_note(self, note: Note) -> None:
        if isinstance(note, StackNote):
            self._files.stack(note)
        elif isinstance(note, StepNote):
            self._files.step(note.step)
        elif isinstance(note, EndNote):
            if isinstance(self._files, StepFiles):  # other layouts do not say which steps are whole
                self._files.end_step(note.step)
        elif isinstance(note, DropNote):
            for token in note.tokens:
                stored = self._stored.pop(token, None)
                if stored is not None:
                    self._tensors.discard(stored.offset)
        else:
            self._closing = note


def _open_files(orders: Orders) -> CallFiles:
    if orders.layout:
        module, _, function = WRITERS[orders.layout].partition(":")
        files: CallFiles = getattr(import_module(module), function)(orders.layout_options, orders.rank)
        return files
    store = TensorStore(keep_data=orders.keep_data, max_bytes=orders.max_bytes, direct=orders.direct)
    return StepFiles(
        RunPlace(Path(orders.run)), orders.rank, store, trainer_pid=orders.trainer_pid, lock=orders.lock_fd
    )


def _by_step(frames: list[Frame]) -> Iterator[list[Frame]]:
    """Split a batch at each change of step: what follows goes to other files."""
    start = 0
    for i, frame in enumerate(frames):
        if isinstance(frame.note, StepNote):
            yield frames[start : i + 1]
            start = i + 1
    yield frames[start:]


class _PartialTensor:
    """A tensor that has not arrived completely."""

    def __init__(self, offset: int | None) -> None:
        self.offset = offset
        self.nbytes = 0
        self.moments: list[tuple[Moments, int]] = []
        self.digest = RunningDigest()


def main(orders_json: str) -> None:
    """Entry of the recorder process."""
    import signal

    # The trainer decides when a run ends. Its recorder writes what it was given, and then ends by itself.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    orders = msgspec.json.decode(orders_json, type=Orders)
    ring = Ring(orders.ring_bytes, orders.ring_fd)
    recorder = Recorder(orders, ring)
    recorder.run()
    # The trainer reads it from here: a dump in another layout has no place for it, and a folder may be gone.
    write_all(1, b"\0" + (b"" if recorder.part is None else msgspec.json.encode(recorder.part)))
    os._exit(0)  # everything is written and closed; taking the interpreter down would keep the trainer waiting

"""The trainer's end of the record: copies bytes into the ring and sends messages to the recorder.

Safe to call from several threads. When `put` and `call` have returned, the call survives the death of this process.
If the recorder dies, nothing is raised: `failure` says what happened, and everything after is dropped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tensorprobe.model.event import Event, Frames
from tensorprobe.model.interrupts import is_from_program
from tensorprobe.model.manifest import RankPart
from tensorprobe.numerics.native import implementation
from tensorprobe.record.messages import CloseNote, DropNote, Note, Orders, StackNote, StepNote
from tensorprobe.record.recorder import Recorder
from tensorprobe.record.ring import ALIGNMENT, Ring

_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_WAIT_S = 0.0002
_START_S = 5.0
_AHEAD_BYTES = 8 << 20
_WARM_BYTES = 48 << 20
_CLOSED = -1
_END = 1 << 62

# Places in `RunWriter.state`, which the C loop of capture reads and writes too.
HEAD, FREE_TO, POPULATED, TOKENS, BYTES_SEEN = range(5)
_DEFAULT_RING_BYTES = 128 << 20


class RunWriter:
    """Hands calls and tensors of one rank to its recorder."""

    def __init__(
        self,
        run: Path,
        rank: int,
        *,
        keep_data: bool,
        max_bytes: int | None = None,
        ring_bytes: int = _DEFAULT_RING_BYTES,
        in_process: bool = False,
        direct: bool = True,
        layout: str = "",
        layout_options: dict[str, Any] | None = None,
        lock: int = -1,
    ) -> None:
        """`layout` is a name in `tensorprobe.registry.WRITERS`; `lock` is a descriptor for the recorder to hold open."""
        ring_bytes -= ring_bytes % (4 * ALIGNMENT)  # so that pieces of large tensors begin and end between elements
        self.lock = threading.RLock()
        self._encode = msgspec.msgpack.Encoder().encode
        self.pieces: list[tuple[int, int, int, bool]] = []
        self.state = array("q", [0, ring_bytes, 0, 0, 0])
        self._largest = ring_bytes // 4
        self._memcpy = implementation().copy
        self._out, self._written = b"", list[int]()
        self._is_cut = False
        self.last_sent: Event | None = None
        """The last call that is on its way."""
        self.failure: str | None = None
        self._closed = False
        self.waited_s = 0.0
        base = Orders(
            run=str(run.absolute()),
            rank=rank,
            trainer_pid=os.getpid(),
            ring_fd=-1,
            ring_bytes=ring_bytes,
            pipe_fd=-1,
            keep_data=keep_data,
            max_bytes=max_bytes,
            direct=direct,
            layout=layout,
            layout_options=layout_options or {},
        )
        self._ring, self._pipe, self._recorder = _start(base, in_process=in_process, lock=lock)
        self._size = ring_bytes
        self._address = self._ring.address
        self._populate(min(_WARM_BYTES, ring_bytes))
        self._wait_until_read()

    @property
    def ring(self) -> tuple[int, int, int]:
        """Return address, size, and the largest tensor that goes into it in one piece: for the C loop of capture, under `lock`."""
        return self._address, self._size, self._largest

    def put(self, copies: list[tuple[int, int, int]]) -> int:
        """Copy tensors, each an address, a number of bytes and a dtype code. Waits when the ring is full.

        Returns the token of the first; the others follow it by one each.
        """
        with self.lock:
            token = self.state[TOKENS]
            if self.failure is None and not self._closed:
                try:
                    for address, nbytes, dtype_code in copies:
                        if nbytes <= self._largest:
                            self._copy(address, nbytes, dtype_code, True)
                        else:
                            self._copy_in_pieces(address, nbytes, dtype_code)
                except BaseException:
                    self._end_cut_tensor()
                    raise
            return token

    def _end_cut_tensor(self) -> None:
        """A copy was interrupted between the pieces of a tensor: what came of it is a tensor that no call names."""
        if self._is_cut:
            self._add_piece(self.state[HEAD], 0, self.state[HEAD], 0, True)

    def call(self, event: Event) -> None:
        """Send a call that has ended."""
        with self.lock:
            self._send((self.pieces, event))

    def stack(self, number: int, frames: Frames) -> None:
        """Send a stack, before the first call that names it."""
        self._note(StackNote(number, frames))

    def step(self, step: int) -> None:
        """What follows belongs to this step."""
        self._note(StepNote(step))

    def drop(self, tokens: list[int]) -> None:
        """Forget tensors that were put: no call will name them."""
        self._note(DropNote(tokens))

    def close(self, coverage: dict[str, Any], coordinates: dict[str, int], device: str) -> None:
        """End the run and wait until everything is on disk."""
        with self.lock:
            if not self._closed:
                self._note(CloseNote(coverage, coordinates, device))
                self.state[FREE_TO] = _CLOSED  # a thread that comes late finds no room, in C as in Python
                self._closed = True  # and writes nothing to the number of our pipe, which may be another file's by then
                os.close(self._pipe)
        problem = self._recorder.join()
        if problem is not None and self.failure is None:
            self.failure = f"the recorder has ended: {problem}"
        with self.lock:
            self._ring.close()

    @property
    def part(self) -> RankPart | None:
        """Return, after `close`, what became of a dump in another layout, which has no file to say so."""
        return self._recorder.part

    def _copy(self, address: int, nbytes: int, dtype_code: int, last: bool) -> None:
        room = (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        state = self.state
        position = state[HEAD]
        place = position % self._size
        if place + room > self._size:
            position += self._size - place
            place = 0
        end = position + room
        if end > state[FREE_TO]:
            self._wait_for(end)
            if self.failure is not None:
                return
        if place + room > state[POPULATED]:
            self._populate(place + room)
        if nbytes:
            self._memcpy(self._address + place, address, nbytes)
        self._add_piece(position, nbytes, end, dtype_code, last)

    def _add_piece(self, position: int, nbytes: int, end: int, dtype_code: int, last: bool) -> None:
        """All of it or nothing: no exception of a signal's handler comes between, because nothing is called before the end."""
        state = self.state
        piece = (position, nbytes, dtype_code, last)
        state[HEAD], state[TOKENS], self._is_cut, self.pieces[_END:] = end, state[TOKENS] + last, not last, [piece]

    def _populate(self, end: int) -> None:
        """Where the ring is used for the first time, get the memory a good piece ahead. `end` is a place, not a position."""
        start = self.state[POPULATED]
        upto = min(max(end, start + _AHEAD_BYTES), self._size)
        self._ring.populate(start, upto - start)
        self.state[POPULATED] = upto

    def _stay_warm(self) -> None:
        """Start the next round early when the recorder keeps up: memory that was used before is warm, the rest of the ring is not."""
        head = self.state[HEAD]
        place = head % self._size
        if place > _WARM_BYTES:
            consumed = self._ring.consumed
            if consumed >= head - place // 2:
                self.state[HEAD] = head - place + self._size
                self.state[FREE_TO] = consumed + self._size

    def _copy_in_pieces(self, address: int, nbytes: int, dtype_code: int) -> None:
        done = 0
        while done < nbytes:
            part = min(self._largest, nbytes - done)
            self._copy(address + done, part, dtype_code, done + part == nbytes)
            done += part
            self._flush_pieces()

    def _wait_until_read(self) -> None:
        """Let the recorder come up first: what training computes meanwhile would only pile up."""
        deadline = time.monotonic() + _START_S
        while not self._ring.is_read and self._recorder.is_alive() and time.monotonic() < deadline:
            time.sleep(_WAIT_S)

    def _wait_for(self, end: int) -> None:
        """Back-pressure: until the recorder has read enough for the ring to reach `end`."""
        state = self.state
        state[FREE_TO] = self._ring.consumed + self._size
        if end <= state[FREE_TO]:
            return
        if self.pieces:
            self._flush_pieces()
        started = time.perf_counter()
        while end > state[FREE_TO] and self.failure is None:
            time.sleep(_WAIT_S)
            state[FREE_TO] = self._ring.consumed + self._size
            if not self._recorder.is_alive():
                self._fail("the recorder has ended")
        self.waited_s += time.perf_counter() - started

    def _note(self, note: Note) -> None:
        with self.lock:
            self._send((self.pieces, None, note))

    def _flush_pieces(self) -> None:
        with self.lock:
            self._send((self.pieces,))

    def _send(self, frame: tuple[Any, ...]) -> None:
        """Send the fields of a `Frame`. Call it under the lock."""
        if self.failure is not None or self._closed:
            return
        if self._out:
            self._drain()  # the program raised an exception into the last one
        body = self._encode(frame)  # first: a call that cannot be encoded must not take the pieces with it
        data = len(body).to_bytes(4, "little") + body
        # From here on the frame is sent: at once, or by the next one.
        self.pieces, self._out, self.last_sent = [], data, frame[1] if len(frame) == 2 else None
        self._stay_warm()
        self._drain()

    def _drain(self) -> None:
        """Write what is to be sent. How much was written is known also when a signal's handler raises after a write."""
        try:
            written = self._written
            while rest := self._out[sum(written) :]:
                written.extend(map(os.write, (self._pipe,), (rest,)))
            self._out, self._written = b"", []
        except OSError as error:
            if is_from_program(error):  # a TimeoutError is an OSError too
                raise
            self._out, self._written = b"", []
            self._fail(f"the recorder has ended ({error.strerror})")

    def _fail(self, reason: str) -> None:
        self.state[FREE_TO] = _CLOSED  # no room any more: nothing piles up that nobody will read
        problem = self._recorder.join()
        self.failure = f"{reason}: {problem}" if problem else reason


class _Running(Protocol):
    """A recorder at work."""

    def is_alive(self) -> bool:
        """Whether it still reads."""

    def join(self) -> str | None:
        """Wait for its end; what went wrong, if anything."""

    @property
    def part(self) -> RankPart | None:
        """What it says of a dump in another form, once it has ended."""


class _RecorderProcess:
    """The recorder in a process of its own, without torch."""

    def __init__(self, orders: Orders, part_fd: int) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from tensorprobe.record.recorder import main; "
            f"main({msgspec.json.encode(orders).decode()!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[fd for fd in (orders.ring_fd, orders.pipe_fd, part_fd) if fd != -1],
            start_new_session=True,  # a signal to the trainer's group or terminal must not reach it
        )
        self._said: tuple[bytes, bytes] | None = None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self) -> str | None:
        if self._said is None:  # it can be read once only, and the recorder may have failed before the run ends
            self._said = self._process.communicate()
        if self._process.returncode == 0:
            return None
        lines = self._said[1].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    @property
    def part(self) -> RankPart | None:
        said = self._said[0] if self._said is not None else b""
        return msgspec.json.decode(said, type=RankPart) if said else None


class _RecorderThread:
    """The recorder as a thread, where no process can be started. It takes its share of the interpreter."""

    def __init__(self, orders: Orders, ring: Ring, lock: int) -> None:
        self._lock = lock
        self._problem: str | None = None
        self.part: RankPart | None = None
        self._orders, self._ring = orders, ring
        self._thread = threading.Thread(target=self._run, name="tensorprobe-recorder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            recorder = Recorder(self._orders, self._ring)
            recorder.run()
            self.part = recorder.part
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            for fd in (self._orders.pipe_fd, self._lock):
                if fd != -1:
                    os.close(fd)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> str | None:
        self._thread.join()
        return self._problem


def _start(base: Orders, *, in_process: bool, lock: int = -1) -> tuple[Ring, int, _Running]:
    """A ring, the writing end of a pipe, and a recorder that reads both.

    From then on only the recorder has `lock` open: workers that this process forks may live longer than the dump.
    """
    reading, writing = os.pipe()
    try:
        import fcntl

        fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, OSError):
        pass  # a smaller pipe only makes the trainer wait a little more often
    if not in_process:
        ring = None
        try:
            ring = Ring.shared(base.ring_bytes)
            orders = msgspec.structs.replace(base, ring_fd=ring.fd, pipe_fd=reading)
            process = _RecorderProcess(orders, lock)
            os.close(reading)
            if lock != -1:
                os.close(lock)
            return ring, writing, process
        except (OSError, AttributeError):
            if ring is not None:
                ring.close()
    ring = Ring(base.ring_bytes)
    orders = msgspec.structs.replace(base, pipe_fd=reading)
    return ring, writing, _RecorderThread(orders, ring, lock)

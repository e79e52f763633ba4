"""The trainer's side of recording: copies bytes into the ring and sends messages to the recorder.

Safe to call from several threads. When `put` and `call` have returned, the call survives the death of this process.
If the recorder dies, nothing is raised: `failure` says what happened, and everything after is dropped.
"""

from __future__ import annotations

import linecache
import os
import select
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from functools import partial
from os import write as _write
from pathlib import Path
from time import monotonic, perf_counter, sleep  # tests of programs replace the functions of `time` and `os`
from typing import Any, Protocol

import msgspec
import numpy

from tensorprobe.model.event import Event, Frames
from tensorprobe.model.interrupts import ignoring, let_through
from tensorprobe.model.manifest import RankPart
from tensorprobe.numerics.native import implementation
from tensorprobe.record.apart import OwnFile, own_pipe, unseen_children
from tensorprobe.record.messages import CloseNote, DropNote, EndNote, Note, Orders, StackNote, StepNote
from tensorprobe.record.recorder import Recorder
from tensorprobe.record.ring import ALIGNMENT, Ring, shared_memory

_HOMES = [str(Path(__file__).parents[2]), *(str(Path(str(each.__file__)).parents[1]) for each in (msgspec, numpy))]
"""Where the recorder looks for imports, after Python's own modules: a program may have a file `enum.py` beside it."""
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_WAIT_S = 0.0002
_START_S = 5.0
_AHEAD_BYTES = 8 << 20
_WARM_BYTES = 48 << 20
_CLOSED = -1
_END = 1 << 62

_SHOWN_S = 0.05
close_watch: Callable[[int, int], None] | None = None
"""Shows the progress at the end of a run; `tensorprobe capture` sets it in the program it runs if a person is waiting."""
# Places in `RunWriter.state`, which the C loop of capture reads and writes too.
HEAD, FREE_TO, POPULATED, TOKENS, BYTES_SEEN, SLOTS_TAKEN = range(6)
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
        self.state = array("q", [0, ring_bytes, 0, 0, 0, 0])
        self._largest = ring_bytes // 4
        self._memcpy = implementation().copy
        self._out, self._written = b"", list[int]()
        self._is_cut = False
        self.last_sent: Event | None = None
        """The last call that was sent."""
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
            lock_fd=lock,
            keep_data=keep_data,
            max_bytes=max_bytes,
            direct=direct,
            layout=layout,
            layout_options=layout_options or {},
        )
        self._size = ring_bytes
        self._ring, self._pipe, self._recorder = _start(base, in_process=in_process)
        try:
            self._address = self._ring.address
            self._populate(min(_WARM_BYTES, ring_bytes))
            self._wait_until_read()
        except BaseException:
            self._pipe.close()
            self._recorder.join()
            self._ring.close()
            raise

    @property
    def recorder_pid(self) -> int:
        """Return the process id of the reader once it reads; 0 before."""
        return self._ring.reader

    @property
    def ring(self) -> tuple[int, int, int]:
        """Return address, size, and the largest tensor that goes into it in one piece: for the C loops of capture, under `lock`."""
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
        """End a tensor whose copy was interrupted between two pieces. No call will name it."""
        if self._is_cut:
            self._add_piece(self.state[HEAD], 0, self.state[HEAD], 0, True)

    def call(self, event: Event) -> None:
        """Send a call that has ended."""
        with self.lock:
            self._send((self.pieces, event))

    def stack(self, number: int, frames: Frames) -> None:
        """Send a stack, before the first call that names it."""
        cells = {
            at: linecache.getline(file, line).strip()
            for at, (file, line, _) in enumerate(frames)
            if linecache.cache.get(file, (0, 0.0))[1:2] == (None,)  # no time of a file: it is on no disk
        }
        self._note(StackNote(number, frames, cells))

    def step(self, step: int) -> None:
        """Begin a step: what follows belongs to it."""
        self._note(StepNote(step))

    def end_step(self, step: int) -> None:
        """End the step: it is complete."""
        self._note(EndNote(step))

    def drop(self, tokens: list[int]) -> None:
        """Forget tensors that were put: no call will name them."""
        self._note(DropNote(tokens))

    def close(self, coverage: dict[str, Any], coordinates: dict[str, int], device: str, raised: str = "") -> None:
        """End the run and wait until everything is on disk. `raised` is the exception that ends the program, if one does."""
        with self.lock:
            if not self._closed:
                self._note(CloseNote(coverage, coordinates, device, raised))
                self.state[FREE_TO] = _CLOSED  # a thread that comes late finds no room, in C as in Python
                self._closed = True  # and writes nothing to the number of our pipe, which may be another file's by then
            self._pipe.close()
        if self._ring.closed:
            return  # it was interrupted, and is called again
        total, before = self.state[HEAD], self._ring.consumed
        watch = close_watch and partial(self._show_close, close_watch, before, total - before)
        problem = self._recorder.join(watch)
        if watch is not None:
            watch(ended=True)
        if problem is not None and self.failure is None:
            self.failure = f"the recorder has ended: {problem}"
        with self.lock:
            self._ring.close()

    def _show_close(self, watch: Callable[[int, int], None], before: int, waiting: int, *, ended: bool = False) -> None:
        """Call `watch` with the bytes written since `before`, and with all that waited then."""
        watch(waiting if ended else min(self._ring.consumed - before, waiting - 1), waiting)

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
        """Add a piece completely or not at all: nothing is called before the end, so no signal handler can interrupt it."""
        state = self.state
        piece = (position, nbytes, dtype_code, last)
        state[HEAD], state[TOKENS], self._is_cut, self.pieces[_END:] = end, state[TOKENS] + last, not last, [piece]

    def _populate(self, end: int) -> None:
        """Allocate memory of the ring well ahead of its first use. `end` is a place, not a position."""
        start = self.state[POPULATED]
        upto = min(max(end, start + _AHEAD_BYTES), self._size)
        self._ring.populate(start, upto - start)
        self.state[POPULATED] = upto

    def _stay_warm(self) -> None:
        """Start the next round early if the recorder keeps up: memory that was used before is warm, the rest is not."""
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
        """Wait until the recorder has started: until then, calls would only pile up."""
        deadline = monotonic() + _START_S
        while not self._ring.reader and self._is_read() and monotonic() < deadline:
            sleep(_WAIT_S)

    def _wait_for(self, end: int) -> None:
        """Wait until the recorder has read enough for the ring to reach `end`."""
        state = self.state
        state[FREE_TO] = self._ring.consumed + self._size
        if end <= state[FREE_TO]:
            return
        if self.pieces:
            self._flush_pieces()
        started = perf_counter()
        while end > state[FREE_TO] and self.failure is None:
            sleep(_WAIT_S)
            state[FREE_TO] = self._ring.consumed + self._size
            if not self._is_read():
                self._fail("the recorder has ended")
        self.waited_s += perf_counter() - started

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
        body = self._encode(frame)  # first: a call that cannot be encoded must not take the pieces with it
        self.send(len(body).to_bytes(4, "little") + body, frame[1] if len(frame) == 2 else None)

    def send(self, data: bytes, event: Event | None = None) -> None:
        """Send a frame that is encoded and has all `pieces`. Call it under the lock. C does, for the calls it records."""
        if self.failure is not None or self._closed:
            return
        if self._out:
            self._drain()  # the program raised an exception into the last one
        self.pieces, self._out, self.last_sent = [], data, event  # from here on it is sent: at once, or by the next one
        self._stay_warm()
        self._drain()

    def _drain(self) -> None:
        """Write what is to be sent. How much was written stays known even if a signal handler raises after a write."""
        try:
            written = self._written
            while rest := self._out[sum(written) :]:
                written.extend(map(_write, (self._pipe.fd,), (rest,)))
            self._out, self._written = b"", []
        except OSError as error:
            let_through(error)  # a TimeoutError is an OSError too
            self._out, self._written = b"", []
            self._fail(f"the recorder has ended ({error.strerror})")

    def _is_read(self) -> bool:
        """Return whether the other end of the pipe is still open."""
        ask = select.poll()
        ask.register(self._pipe.fd, 0)
        return not ask.poll(0)

    def _fail(self, reason: str) -> None:
        self.state[FREE_TO] = _CLOSED  # no room any more: nothing piles up that nobody will read
        self._pipe.close()  # a recorder that still reads ends now
        problem = self._recorder.join()
        self.failure = f"{reason}: {problem}" if problem else reason


class _Running(Protocol):
    """A recorder at work."""

    def join(self, meanwhile: Callable[[], None] | None = None) -> str | None:
        """Wait for it to end, calling `meanwhile` now and then. Return what went wrong, if anything."""

    @property
    def part(self) -> RankPart | None:
        """Return what it reports on the part that it wrote, once it has ended."""


class _RecorderProcess:
    """The recorder in a process of its own, without torch. It is no child of the program, which may wait for its own children."""

    def __init__(self, orders: Orders) -> None:
        code = (
            f"import os, sys; os.fork() and os._exit(0); sys.path += {[*_HOMES, *sys.path]!r}; "
            f"from tensorprobe.record.recorder import main; main({msgspec.json.encode(orders).decode()!r})"
        )
        self._said = b""
        self._hears, says = own_pipe()
        try:
            with unseen_children():
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=says.fd,
                    stderr=says.fd,
                    pass_fds={orders.ring_fd, orders.pipe_fd, orders.lock_fd} - {-1},
                    start_new_session=True,  # a signal to the trainer's group or terminal must not reach it
                )
                if process.wait():
                    raise OSError("no process could be started")
        except BaseException:
            self._hears.close()
            raise
        finally:
            says.close()

    def join(self, meanwhile: Callable[[], None] | None = None) -> str | None:
        with ignoring(OSError):  # the program has closed the pipe
            while self._hears.fd != -1:
                while meanwhile is not None and not self._says_more():
                    meanwhile()
                if not (heard := os.read(self._hears.fd, 1 << 16)):
                    break
                self._said += heard
        self._hears.close()
        if b"\0" in self._said:
            return None
        lines = self._said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it was killed, or the program has closed its pipe"

    def _says_more(self) -> bool:
        """Wait a moment; return whether there is something to read, or the end."""
        ask = select.poll()
        ask.register(self._hears.fd, select.POLLIN)
        return bool(ask.poll(_SHOWN_S * 1000))

    @property
    def part(self) -> RankPart | None:
        said = self._said.rpartition(b"\0")[2] if b"\0" in self._said else b""
        return msgspec.json.decode(said, type=RankPart) if said else None


class _RecorderThread:
    """The recorder as a thread, if no process can be started. It shares the interpreter with the training."""

    def __init__(self, orders: Orders, ring: Ring, held: list[OwnFile]) -> None:
        self._held = held
        self._problem: str | None = None
        self.part: RankPart | None = None
        self._orders, self._ring = orders, ring
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="tensorprobe-recorder", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            recorder = Recorder(self._orders, self._ring)
            recorder.run()
            self.part = recorder.part
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            for file in self._held:
                file.close()

    def join(self, meanwhile: Callable[[], None] | None = None) -> str | None:
        thread = self._thread
        while thread is not None and meanwhile is not None and thread.is_alive():
            thread.join(_SHOWN_S)
            meanwhile()
        if thread is not None:
            thread.join()
            self._thread = (
                None  # freed now: later, Python would ignore what a signal's handler raises as it is forgotten
            )
        return self._problem


def _start(base: Orders, *, in_process: bool) -> tuple[Ring, OwnFile, _Running]:
    """Return a ring, the writing end of a pipe, and a recorder that reads both.

    From then on only the recorder has `base.lock_fd` open: workers that this process forks may live longer than the dump.
    """
    held = [OwnFile(base.lock_fd)] if base.lock_fd != -1 else []
    try:
        base = msgspec.structs.replace(base, lock_fd=held[0].fd if held else -1)
        reading, writing = own_pipe()
        held += reading, writing
        with ignoring(ImportError, OSError):  # a smaller pipe makes the trainer wait a little more often
            import fcntl

            fcntl.fcntl(writing.fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        if not in_process:
            with ignoring(OSError, AttributeError):  # no shared memory here, or no further process
                ring, recorder = _start_process(msgspec.structs.replace(base, pipe_fd=reading.fd))
                for file in held[:-1]:
                    file.close()
                return ring, writing, recorder
        ring = Ring(base.ring_bytes)
        orders = msgspec.structs.replace(base, pipe_fd=reading.fd)
        return ring, writing, _RecorderThread(orders, ring, held[:-1])
    except BaseException:
        for file in held:
            file.close()
        raise


def _start_process(base: Orders) -> tuple[Ring, _RecorderProcess]:
    """Start a process that reads a shared ring and the pipe."""
    memory = OwnFile(shared_memory(base.ring_bytes))
    try:
        ring = Ring(base.ring_bytes, memory.fd)
        try:
            return ring, _RecorderProcess(msgspec.structs.replace(base, ring_fd=memory.fd))
        except BaseException:
            ring.close()
            raise
    finally:
        memory.close()

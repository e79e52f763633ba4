"""Appends tensors to `tensors.bin`.

In: bytes. Out: the offset that they will have. `flush()` returns when everything appended is in the file.
Data is gathered in large aligned buffers and written by a thread of its own, past the page cache where the file system
allows it (O_DIRECT): that is steadier and leaves the processor to the training. Equal bytes are written once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tensorprobe.model.interrupts import let_through
from tensorprobe.record.ring import ALIGNMENT, aligned

BUFFER_BYTES = 8 << 20
ADDRESS, USED, START = range(3)
"""Places in `BlobWriter.state`."""
_BLOCK_BYTES = 4096
_BUFFERS = 3
_ZEROS = bytes(ALIGNMENT)


def make_buffers() -> list[mmap.mmap]:
    """Return the buffers that a `BlobWriter` needs; a later one may have them again, without their page faults."""
    return [mmap.mmap(-1, BUFFER_BYTES) for _ in range(_BUFFERS)]


class BlobWriter:
    """One `tensors.bin`, being written. The first failure to write is raised by the call that meets it.

    `written_to` is the length up to which the file is complete. Nothing is written after a failure, so there are no holes.
    """

    def __init__(self, path: Path, *, direct: bool = True, buffers: list[mmap.mmap] | None = None) -> None:
        self._fd, self.direct = _open(path, direct)
        self._free = list(buffers or make_buffers())
        self._views = {id(buffer): memoryview(buffer) for buffer in self._free}
        self._busy: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tensorprobe-blob")
        self.state = array("q", [0, 0, 0])
        """The buffer being filled: its address, how much of it is used, where it begins in the file. Shared with C."""
        self._take_buffer()
        self.offsets: dict[tuple[str, int], int] = {}
        """Where bytes are stored, by digest and size."""
        self._failure: OSError | None = None
        self.written_to = 0

    @property
    def size_bytes(self) -> int:
        """The length of the file once everything appended is written."""
        return self.state[START] + self.state[USED]

    def find(self, digest: str, nbytes: int) -> int | None:
        """Return the offset of these bytes if they are stored already."""
        return self.offsets.get((digest, nbytes))

    def remember(self, digest: str, nbytes: int, offset: int) -> None:
        """Make `find` know the bytes that were just appended."""
        self.offsets[digest, nbytes] = offset

    def append(self, data: memoryview) -> int:
        """Add bytes, padded to the alignment, and return their offset."""
        offset, used = self.size_bytes, self.state[USED]
        end = used + len(data)
        next_used = aligned(end)
        if next_used < BUFFER_BYTES:  # nearly always
            view = self._views[id(self._current)]
            view[used:end] = data
            view[end:next_used] = _ZEROS[: next_used - end]
            self.state[USED] = next_used
            return offset
        self.extend(data)
        self.pad()
        return offset

    def extend(self, data: memoryview) -> None:
        """Add bytes right after the last ones: for a tensor that comes in pieces."""
        taken = 0
        while taken < len(data):
            used = self.state[USED]
            part = data[taken : taken + BUFFER_BYTES - used]
            self._views[id(self._current)][used : used + len(part)] = part
            self.state[USED] += len(part)
            taken += len(part)
            if self.state[USED] == BUFFER_BYTES:
                self._submit()

    def pad(self) -> None:
        """Fill up to the alignment, so that the next tensor may start."""
        missing = aligned(self.state[USED]) - self.state[USED]
        if missing:
            self.extend(memoryview(bytes(missing)))

    def rewind(self, offset: int) -> bool:
        """Forget what was appended from `offset` on. Return False if it has left the buffer already."""
        if offset < self.state[START]:
            return False
        self.state[USED] = offset - self.state[START]
        return True

    def flush(self) -> None:
        """Return when all appended bytes are in the file. The last, unfilled block is written and will be written again."""
        self._collect(0)
        _, used, start = self.state
        if used:
            self._write(self._current, used, start)
            keep = used - used % _BLOCK_BYTES
            if keep:
                view = self._views[id(self._current)]
                tail = bytes(view[keep:used])
                view[: len(tail)] = tail
                self.state[START] += keep
                self.state[USED] = len(tail)

    def close(self) -> None:
        """Write what is left, cut the file to its true length, and close it whatever happened."""
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            try:
                os.ftruncate(self._fd, self.written_to)
            finally:
                os.close(self._fd)

    def _take_buffer(self) -> None:
        self._current = self._free.pop()
        self.state[ADDRESS] = ctypes.addressof(ctypes.c_char.from_buffer(self._current))

    def _submit(self) -> None:
        buffer, start = self._current, self.state[START]
        self._busy.append((self._writer.submit(self._write, buffer, BUFFER_BYTES, start), buffer))
        self.state[START] += BUFFER_BYTES
        self.state[USED] = 0
        if not self._free:
            self._collect(_BUFFERS - 2)
        self._take_buffer()

    def _collect(self, most: int) -> None:
        """Wait until at most `most` writes are under way."""
        while len(self._busy) > most:
            done, buffer = self._busy.popleft()
            self._free.append(buffer)
            done.result()

    def _write(self, buffer: mmap.mmap, nbytes: int, offset: int) -> None:
        length = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES if self.direct else nbytes
        view = self._views[id(buffer)][:length]
        end = offset + nbytes
        if self._failure is not None:
            raise self._failure
        try:
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            self._failure = error
            self.written_to = max(self.written_to, min(offset, end))  # the part that a full disk still took is whole
            raise
        self.written_to = max(self.written_to, end)


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """Return an open file, and whether it takes aligned writes past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            let_through(error)  # the file system has no O_DIRECT (tmpfs, some network ones): ordinary writes serve
    return os.open(path, flags, 0o644), False

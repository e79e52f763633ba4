"""Appends tensors to `tensors.bin`.

In: bytes. Out: the offset that they will have. `flush()` returns when everything appended is in the file.
Data is gathered in large aligned buffers and written by a thread of its own, past the page cache where the file system
allows it (O_DIRECT): that is steadier and leaves the processor to the training. Equal bytes are written once.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tensorprobe.model.interrupts import let_through
from tensorprobe.record.ring import ALIGNMENT, aligned

BUFFER_BYTES = 8 << 20
_BLOCK_BYTES = 4096
_BUFFERS = 3
_ZEROS = bytes(ALIGNMENT)


class BlobWriter:
    """One `tensors.bin`, being written. The first failure to write is raised by the call that meets it.

    `written_to` is the length up to which the file is complete. Nothing is written after a failure, so there are no holes.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self._fd, self.direct = _open(path, direct)
        self._free = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(_BUFFERS)]
        self._views = {id(buffer): memoryview(buffer) for buffer in self._free}
        self._busy: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tensorprobe-blob")
        self._current = self._free.pop()
        self._used = 0
        self._start = 0
        self._offsets: dict[tuple[str, int], int] = {}
        self._failure: OSError | None = None
        self.written_to = 0

    @property
    def size_bytes(self) -> int:
        """The length of the file once everything appended is written."""
        return self._start + self._used

    def find(self, digest: str, nbytes: int) -> int | None:
        """Return the offset of these bytes if they are stored already."""
        return self._offsets.get((digest, nbytes))

    def remember(self, digest: str, nbytes: int, offset: int) -> None:
        """Make `find` know the bytes that were just appended."""
        self._offsets[digest, nbytes] = offset

    def append(self, data: memoryview) -> int:
        """Add bytes, padded to the alignment, and return their offset."""
        offset, used = self.size_bytes, self._used
        end = used + len(data)
        next_used = aligned(end)
        if next_used < BUFFER_BYTES:  # nearly always
            view = self._views[id(self._current)]
            view[used:end] = data
            view[end:next_used] = _ZEROS[: next_used - end]
            self._used = next_used
            return offset
        self.extend(data)
        self.pad()
        return offset

    def extend(self, data: memoryview) -> None:
        """Add bytes right after the last ones: for a tensor that comes in pieces."""
        taken = 0
        while taken < len(data):
            part = data[taken : taken + BUFFER_BYTES - self._used]
            self._views[id(self._current)][self._used : self._used + len(part)] = part
            self._used += len(part)
            taken += len(part)
            if self._used == BUFFER_BYTES:
                self._submit()

    def pad(self) -> None:
        """Fill up to the alignment, so that the next tensor may start."""
        missing = aligned(self._used) - self._used
        if missing:
            self.extend(memoryview(bytes(missing)))

    def rewind(self, offset: int) -> bool:
        """Forget what was appended from `offset` on. Return False if it has left the buffer already."""
        if offset < self._start:
            return False
        self._used = offset - self._start
        return True

    def flush(self) -> None:
        """Return when all appended bytes are in the file. The last, unfilled block is written and will be written again."""
        self._collect(0)
        if self._used:
            self._write(self._current, self._used, self._start)
            keep = self._used - self._used % _BLOCK_BYTES
            if keep:
                view = self._views[id(self._current)]
                tail = bytes(view[keep : self._used])
                view[: len(tail)] = tail
                self._start += keep
                self._used = len(tail)

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

    def _submit(self) -> None:
        buffer, start = self._current, self._start
        self._busy.append((self._writer.submit(self._write, buffer, BUFFER_BYTES, start), buffer))
        self._start += BUFFER_BYTES
        self._used = 0
        if not self._free:
            self._collect(_BUFFERS - 2)
        self._current = self._free.pop()

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

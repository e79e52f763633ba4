"""Decides whether and where the bytes of a tensor are kept, and survives a full or broken disk.

Disk errors are counted, not raised. The step goes on with summaries only, and the next step tries again.
"""

from __future__ import annotations

from collections import Counter
from mmap import mmap
from pathlib import Path

from tensorprobe.model.interrupts import let_through
from tensorprobe.record.blob_writer import BlobWriter, make_buffers


class TensorStore:
    """The `tensors.bin` of the current step. `failures` counts what went wrong, by message."""

    wants_digest = True

    def __init__(self, *, keep_data: bool, max_bytes: int | None, direct: bool) -> None:
        self.keeps_data, self._max_bytes, self._direct = keep_data, max_bytes, direct
        self._path: Path | None = None
        self._blob: BlobWriter | None = None
        self._buffers: list[mmap] = []
        self._broken = False
        self._bytes_before = 0
        self.failures: Counter[str] = Counter()
        self.over_limit = False
        self.confirmed = 0
        self.closed_bytes: int | None = None
        """The length of this step's file once it is closed; None if there is none, or the disk failed."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes kept in the current step so far."""
        return self._blob.size_bytes if self._blob is not None else 0

    @property
    def total_bytes(self) -> int:
        """The number of bytes kept in all steps so far."""
        return self._bytes_before + self.size_bytes

    @property
    def broken(self) -> bool:
        """Whether offsets beyond `confirmed` point at bytes that never reached the file."""
        return self._broken

    def store(self, data: memoryview, digest: str) -> int | None:
        """Return the offset of these bytes, new or known; None when they are not kept."""
        if not self.keeps_data or not data:
            return 0 if self.keeps_data else None
        blob = self._open()
        if blob is None:
            return None
        known = blob.find(digest, len(data))
        if known is not None or not self._has_room(len(data)):
            return known
        try:
            offset = blob.append(data)
        except OSError as error:
            self._fail(error)
            return None
        blob.remember(digest, len(data), offset)
        return offset

    def room(self) -> tuple[tuple[int, dict[tuple[str, int], int]] | None, int]:
        """Return, for C, the open file as the address of its state and its offsets, and how long it may become."""
        limit = 2**62 if self._max_bytes is None else self._max_bytes - self._bytes_before
        blob = self._blob
        return None if blob is None else (blob.state.buffer_info()[0], blob.offsets), limit

    def begin(self) -> int | None:
        """Start a tensor that comes in pieces. Return its offset, or None when it is not kept."""
        blob = self._open() if self.keeps_data else None
        return None if blob is None else blob.size_bytes

    def extend(self, data: memoryview) -> None:
        """Add a piece."""
        if self._blob is not None and self._has_room(len(data)):
            try:
                self._blob.extend(data)
            except OSError as error:
                self._fail(error)

    def end(self, offset: int | None, digest: str, nbytes: int) -> int | None:
        """End the tensor in pieces that started at `offset`; None when a piece is missing."""
        blob = self._blob
        if blob is None or offset is None:
            return None
        known = blob.find(digest, nbytes)
        whole = blob.size_bytes - offset == nbytes
        if (known is not None or not whole) and blob.rewind(offset):
            return known
        blob.pad()
        if not whole:
            return known
        blob.remember(digest, nbytes, offset)
        return offset

    def discard(self, offset: int | None) -> None:
        """Do nothing for bytes that no call names: they are in the file already and stay there."""

    def open_in(self, folder: Path) -> None:
        """Put the next tensor into a new file in this folder."""
        self.close()
        self._path, self.closed_bytes = folder / "tensors.bin", None

    def flush(self) -> None:
        """Return when everything stored is in the file, or is known to be lost."""
        if self._blob is not None:
            try:
                self._blob.flush()
                self.confirmed = self._blob.written_to
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """End the current file."""
        blob, self._blob = self._blob, None
        self._broken, self.confirmed = False, 0
        if blob is not None:
            self._bytes_before += blob.size_bytes
            self._close_blob(blob)

    def _open(self) -> BlobWriter | None:
        if self._blob is None and not self._broken and self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._buffers = self._buffers or make_buffers()
                self._blob = BlobWriter(self._path, direct=self._direct, buffers=self._buffers)
            except OSError as error:
                self._fail(error)
        return self._blob

    def _has_room(self, nbytes: int) -> bool:
        if self._max_bytes is None or self.total_bytes + nbytes <= self._max_bytes:
            return True
        self.over_limit = True
        return False

    def _fail(self, error: OSError) -> None:
        self._count(error)
        self._broken = True
        blob, self._blob = self._blob, None
        if blob is not None:
            self._close_blob(blob)
            self.confirmed = blob.written_to
            self._bytes_before += blob.written_to
        let_through(error)

    def _close_blob(self, blob: BlobWriter) -> None:
        try:
            blob.close()
            self.closed_bytes = blob.written_to
        except OSError as error:
            self._count(error)
            let_through(error)

    def _count(self, error: OSError) -> None:
        self.failures[f"tensors.bin: {error.strerror or error}"] += 1

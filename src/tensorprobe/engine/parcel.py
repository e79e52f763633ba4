"""A task on its way to another process or machine and back, as bytes: MessagePack for the task and its result, an Arrow
stream for the rows.

An error that the user can mend is part of the outcome and is raised again, unchanged, where the outcome is unpacked.
Both ends must be the same version of tensorprobe; otherwise results could depend on where a task ran.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe import errors
from tensorprobe.engine.places import fetched
from tensorprobe.engine.rank_task import Progress, RankResult, RankTask, compare_rank
from tensorprobe.errors import CannotCompare, SettingsError, TensorprobeError
from tensorprobe.version import VERSION

if TYPE_CHECKING:
    import pyarrow as pa

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class _Parcel(msgspec.Struct, frozen=True):
    tool: str
    task: RankTask
    rows: bool
    """Whether the rows are to come back."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What comes back beside the rows."""

    result: RankResult | None = None
    error: tuple[str, str] | None = None
    """Class and message."""
    pairs: int = 0
    """How many pairs of calls were compared."""


def run_task(
    task: RankTask, *, progress: Progress | None = None, write: Callable[[pa.RecordBatch], None] | None = None
) -> RankResult:
    """Run the task in this process, with what is behind a URL fetched first."""
    try:
        with fetched(task) as here:
            return compare_rank(here, progress=progress, write=write)
    except OSError as error:
        refusal = as_refusal(error)
        if refusal is None:
            raise
        raise refusal from error


def as_refusal(error: OSError) -> CannotCompare | None:
    """A full disk and the like as an error of ours; None for what is not the user's to mend."""
    if isinstance(error, TensorprobeError) or error.errno not in _REFUSALS:
        return None
    return CannotCompare(f"the result cannot be written: {error}.\n  Pass another output folder (-o).")


def pack(task: RankTask, *, rows: bool) -> bytes:
    """The task as bytes; with `rows` its rows are wanted back."""
    return msgspec.msgpack.encode(_Parcel(VERSION, task, rows))


def perform(parcel: bytes, progress: Progress | None = None) -> tuple[bytes, bytes]:
    """Run a packed task: the packed outcome, and the packed rows or nothing."""
    tool = msgspec.msgpack.decode(parcel, type=_Tool).tool
    if tool != VERSION:
        return _failed(SettingsError(f"the worker has tensorprobe {VERSION}, this is {tool}. Install the same there."))
    wish = msgspec.msgpack.decode(parcel, type=_Parcel)
    done = 0

    def count(pairs: int) -> None:
        nonlocal done
        done += pairs
        if progress is not None:
            progress(pairs)

    rows = _PackedRows() if wish.rows else None
    try:
        result = run_task(wish.task, progress=count, write=None if rows is None else rows.write)
    except TensorprobeError as error:
        return _failed(error)
    return msgspec.msgpack.encode(Outcome(result=result, pairs=done)), b"" if rows is None else rows.close()


def unpack(outcome: bytes) -> tuple[RankResult, int]:
    """The result, and how many pairs of calls were compared; or the error of the task is raised."""
    held = msgspec.msgpack.decode(outcome, type=Outcome)
    if held.result is None:
        kind, message = held.error or ("TensorprobeError", "a worker gave nothing back")
        raise getattr(errors, kind, TensorprobeError)(message)
    return held.result, held.pairs


def unpack_rows(packed: bytes) -> Iterator[pa.RecordBatch]:
    """The rows that `perform` packed."""
    import pyarrow as pa

    if packed:
        with pa.ipc.open_stream(packed) as stream:
            yield from stream


class _Tool(msgspec.Struct):
    tool: str


def _failed(error: TensorprobeError) -> tuple[bytes, bytes]:
    return msgspec.msgpack.encode(Outcome(error=(type(error).__name__, str(error)))), b""


class _PackedRows:
    """Batches as one Arrow stream in memory, compressed: rows repeat themselves, a tenth of their size is usual."""

    def __init__(self) -> None:
        import pyarrow as pa

        self._sink = pa.BufferOutputStream()
        self._stream: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        if self._stream is None:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._stream = pa.ipc.new_stream(self._sink, batch.schema, options=options)
        self._stream.write_batch(batch)

    def close(self) -> bytes:
        if self._stream is None:
            return b""
        self._stream.close()
        packed: bytes = self._sink.getvalue().to_pybytes()
        return packed

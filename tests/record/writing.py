"""A writer used without capture: bytes of numpy arrays put by hand, calls as events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from tensorprobe.model.dtypes import DTYPES
from tensorprobe.model.event import Event, SlotEvent
from tensorprobe.record.run_folder import make_run
from tensorprobe.record.writer import RunWriter

Array = numpy.ndarray[Any, Any]


def start_writer(run: Path, *, keep_data: bool = True, **settings: Any) -> RunWriter:
    """A folder made ready and a recorder that waits."""
    claim = make_run(run, 0, 1, torch_version="2.13.0", settings={})
    return RunWriter(run, 0, keep_data=keep_data, lock=claim, **settings)


def put(writer: RunWriter, array: Array) -> int:
    """The token of an array's bytes."""
    return writer.put([(array.ctypes.data, array.nbytes, DTYPES[str(array.dtype)].code)])


def slot(writer: RunWriter, name: str, array: Array) -> SlotEvent:
    """A slot whose bytes were just put."""
    return SlotEvent(name, str(array.dtype), array.shape, token=put(writer, array))


def call(writer: RunWriter, name: str, *slots: SlotEvent, **more: Any) -> None:
    writer.call(Event(name, **more, slots=list(slots)))


def close(writer: RunWriter, **coverage: Any) -> str | None:
    """End the run; what went wrong, if anything."""
    writer.close({"seen": 0, **coverage}, {}, "cpu")
    return writer.failure

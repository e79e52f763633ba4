"""Calls whose statistics are still on the device: they wait until many can be fetched in one transfer.

Asking a device for one number makes the training wait for everything before it. In summary mode the statistics of device
tensors are computed there and kept there; the calls queue up, in order, and are handed over a batch at a time.
"""

from __future__ import annotations

import threading
from typing import Any

from tensorprobe.numerics.device_summary import fetch_moments
from tensorprobe.record.writer import RunWriter
from tensorprobe.taps.sinks import Sink

SUMMARY = 8
"""The place of the statistics among the fields of a slot; a slot that has none yet ends before it."""
_SLOTS = 12
_BATCH = 512


class LateSummaries:
    """Hands calls to the writer, now or later, in the order they came."""

    def __init__(self, writer: RunWriter | Sink) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._queue: list[tuple[Any, ...]] = []
        self._waiting: list[list[Any]] = []

    def call(self, event: tuple[Any, ...]) -> None:
        """Take a call; some of its slots may end with a tensor of statistics."""
        late = [slot for slot in event[_SLOTS] if len(slot) > SUMMARY]
        if not late and not self._queue:
            self._writer.call(event)
            return
        with self._lock:
            self._queue.append(event)
            self._waiting += late
        if len(self._waiting) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Fetch all that wait, in one transfer, and hand the calls over."""
        with self._lock:
            queue, self._queue = self._queue, []
            waiting, self._waiting = self._waiting, []
        if waiting:
            for slot, moments in zip(waiting, fetch_moments([slot[SUMMARY] for slot in waiting]), strict=True):
                slot[SUMMARY] = tuple(moments)
        for event in queue:
            self._writer.call(event)

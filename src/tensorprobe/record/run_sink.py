"""The sink that records: calls and their tensors go to a recorder, which writes a run on disk.

In summary mode the statistics of device tensors are computed and kept on the device. Their calls wait, in order, until many
can be fetched in one transfer: asking a device for one number makes the training wait for everything before it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import torch

from tensorprobe.model.event import Event, Frames, SlotEvent
from tensorprobe.model.manifest import Coverage, RankPart
from tensorprobe.model.sink import Needs, Sink, Tensors
from tensorprobe.numerics.device_summary import fetch_moments
from tensorprobe.record.apart import OwnFile
from tensorprobe.record.provenance import provenance
from tensorprobe.record.run_folder import make_run, refuse_existing
from tensorprobe.record.snapshot import Snapshots
from tensorprobe.record.writer import RunWriter

_BATCH = 512


class RecordSettings(Protocol):
    """The settings that concern the record: a part of the probe's CaptureSettings."""

    @property
    def mode(self) -> str:
        """summary, tensor or structure."""

    @property
    def floating_only(self) -> bool:
        """Values of floating and complex tensors only."""

    @property
    def max_bytes(self) -> int | None:
        """Maximum bytes of values, over all ranks."""

    @property
    def ring_bytes(self) -> int:
        """Memory for tensors on their way to the disk."""

    @property
    def in_process(self) -> bool:
        """Record from a thread instead of a process."""


class RunSink(Sink):
    """Writes a run into `out`. `overwrite` replaces a run that is already there; `about` is added to its provenance."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        needs: Needs | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._about = about
        self.out = Path(out)
        self._overwrite = overwrite
        self.needs = msgspec.structs.replace(needs or Needs(), self_test=True, roles=needs is None)
        self._lock = threading.Lock()
        self._queue: list[Event] = []
        self._waiting: list[SlotEvent] = []

    def check(self, rank: int) -> None:
        """Raise RunExists when the folder is taken."""
        refuse_existing(self.out, rank, overwrite=self._overwrite)

    def open(self, rank: int, world_size: int, settings: RecordSettings) -> None:
        """Make the folder and start the recorder."""
        described = msgspec.to_builtins(settings)
        about = {**provenance(), **self._about} if rank == 0 or not (self.out / "manifest.json").exists() else {}
        version = str(torch.__version__)
        claim = make_run(
            self.out,
            rank,
            world_size,
            torch_version=version,
            settings=described,
            provenance=about,
            overwrite=self._overwrite,
        )
        mine = OwnFile(claim, move=False)
        try:
            self._start(rank, world_size, settings, lock=claim)
        except BaseException:
            mine.close()
            raise

    def _start(self, rank: int, world_size: int, settings: RecordSettings, **layout: Any) -> None:
        self._rank = rank
        self._writer = RunWriter(
            self.out,
            rank,
            keep_data=settings.mode == "tensor",
            max_bytes=None if settings.max_bytes is None else settings.max_bytes // world_size,
            ring_bytes=settings.ring_bytes,
            in_process=settings.in_process,
            **layout,
        )
        self._snapshots = Snapshots(self._writer, mode=settings.mode, floating_only=settings.floating_only)
        self._may_wait = settings.mode == "summary"

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        """The reason why the recorder ended early."""
        return self._writer.failure

    @property
    def in_c(self) -> tuple[Any, RunWriter] | None:
        """What C records plain calls with; None where it does not copy their tensors."""
        return None if self._snapshots.context is None else (self._snapshots.context, self._writer)

    @property
    def slots_taken(self) -> int:  # type: ignore[override]
        """The number of tensors that were taken."""
        return self._snapshots.slots

    @property
    def slots_skipped(self) -> Mapping[str, int]:  # type: ignore[override]
        """The number of tensors that were left out, by reason."""
        return self._snapshots.skipped

    @property
    def bytes_seen(self) -> int:  # type: ignore[override]
        """The number of bytes of values that were read."""
        return self._snapshots.bytes_seen

    def begin_step(self, step: int) -> None:
        """Send the number of the step."""
        self._step = step
        self._writer.step(step)

    def end_step(self, *, whole: bool) -> None:
        """Fetch the statistics that are still on a device."""
        self._fetch()
        if whole:
            self._writer.end_step(self._step)

    def stack(self, number: int, frames: Frames) -> None:
        """Send a stack."""
        self._writer.stack(number, frames)

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[SlotEvent]:
        """Copy tensors into the ring."""
        return self._snapshots.take(tensors, but=but, reason=reason)

    def call(self, event: Event) -> None:
        """Send a call, or keep it until its statistics are fetched."""
        if self._may_wait:
            waiting = [slot for slot in event.slots if slot.summary is not None]
            if waiting or self._queue:
                with self._lock:
                    self._queue.append(event)
                    self._waiting += waiting
                if len(self._waiting) >= _BATCH:
                    self._fetch()
                return
        self._writer.call(event)

    def has(self, event: Event) -> bool:
        """Return whether the event is on its way to the recorder."""
        return event is self._writer.last_sent or any(event is waiting for waiting in self._queue)

    def drop(self, slots: list[SlotEvent]) -> None:
        """Let the recorder forget what was copied."""
        tokens = self._snapshots.tokens(slots)
        if tokens:
            self._writer.drop(tokens)

    def close(self, coverage: Coverage, coordinates: dict[str, int], device: str) -> Coverage | None:
        """End the run and wait until everything is on disk. Do nothing if no recorder was started."""
        if not hasattr(self, "_writer"):
            return None
        self._writer.close(msgspec.to_builtins(coverage), coordinates, device, self.ended_by)
        part = self._read_part()
        return part.coverage if part is not None and part.closed else None

    def _read_part(self) -> RankPart | None:
        return self._writer.part

    def _fetch(self) -> None:
        with self._lock:
            queue, self._queue = self._queue, []
            waiting, self._waiting = self._waiting, []
        if waiting:
            for slot, moments in zip(waiting, fetch_moments([slot.summary for slot in waiting]), strict=True):
                slot.summary = tuple(moments)
        for event in queue:
            self._writer.call(event)

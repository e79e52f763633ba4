"""Replays in separate processes: their limits, and how they read calls from a run.

A run is somebody else's file, so whatever replays its calls for a command does so in a process that is limited in time, memory
and the size of files. A replay on the CPU can write to its scratch folder only; drivers of devices need more than that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tensorprobe.model import DTYPES, Call
from tensorprobe.model.precheck import Checked
from tensorprobe.record import blob, open_run
from tensorprobe.record.run import Entry, Run
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.references import registered, search_path
from tensorprobe.text import size
from tensorprobe.work.limits import Limits, allow_mapping, at_most
from tensorprobe.work.pool import Job, processors

blob.before_mapping = allow_mapping  # a run's file may be larger than what its calls need

TIME_LIMIT_S = 60.0
_LEAST_S, _BYTES_IN_LIMIT = 2.0, 60_000_000
"""Processor time that any call may use, and the bytes of tensors from which a call may use the whole time limit."""
_ONE_THREAD = 1 << 20
_LEAST_BYTES, _TIMES_ITS_TENSORS, _THREAD_BYTES = 512 << 20, 256, 16 << 20
"""Memory that any call may use, how often that of its tensors (fused attention: of all pairs of tokens), and that of a thread."""
_MOST_DEATHS = 3
"""Lost processes on the CPU: a hostile run may hold thousands of calls that hang. A device under test may lose any number."""
_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_FILE_BYTES = 16 << 20
"""Enough for what a kernel prints; a replay writes no files."""
_BYTES_PER_ELEMENT = 24
"""Approximate bytes for each element: its own dtype, float64, and the difference."""


class RunPlace(msgspec.Struct, frozen=True):
    """The path of a run, for another process. In bytes, since a path need not be Unicode."""

    path: bytes
    data_folder: bytes | None = None

    @classmethod
    def of(cls, run: Run) -> RunPlace:
        """Return the place of an open run."""
        return cls(os.fsencode(run.path.absolute()), None if run.data is None else os.fsencode(run.data.absolute()))

    def open(self) -> Run:
        """Open the run."""
        return open_run(os.fsdecode(self.path), os.fsdecode(self.data_folder) if self.data_folder else None)


class ProofStart(msgspec.Struct, frozen=True):
    """What a process needs to replay both sides: the runs, the references, and where those are imported from."""

    runs: list[RunPlace]
    references: dict[str, str] = {}
    folders: list[str] = []

    @classmethod
    def of(cls, runs: Iterable[Run]) -> ProofStart:
        """Return the start for open runs, with the references of this process."""
        return cls([RunPlace.of(run) for run in runs], registered(), search_path())


class SideTask(msgspec.Struct, frozen=True):
    """The places of a forward call and its recorded backward in one run of a comparison."""

    step: int
    rank: int
    call: Entry
    backward: Entry | None


class SideRows(msgspec.Struct, frozen=True):
    """The result of a replay of one side; `reason` says why there is none."""

    rows: list[Checked]
    reason: str = ""
    random: bool = False
    """Whether the call draws random numbers: its rows say whether they follow its law."""


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay of both sides, and the script of the wrong side; `reason` says why there is no script."""

    sides: list[SideRows] = []
    script: str = ""
    tensors: bytes = b""
    reason: str = ""


def replay_job(
    target: str,
    start: bytes,
    *,
    device: str = "cpu",
    time_limit_s: float = TIME_LIMIT_S,
    most_bytes: int | None = None,
) -> Job:
    """Return the pool job that replays calls. Its processes inherit the environment, including simulated devices."""
    on_cpu = device.partition(":")[0] == "cpu"
    limits = Limits(
        memory_bytes=(most_bytes or default_replay_bytes()) if on_cpu else None,
        file_bytes=_FILE_BYTES,
        read_only=on_cpu,
    )
    return Job(
        target=target,
        start=start,
        isolated=False,
        time_limit_s=time_limit_s,
        limits=limits,
        most_deaths=_MOST_DEATHS if on_cpu else None,
    )


@contextmanager
def limited(call: Call, limit_s: float = TIME_LIMIT_S) -> Iterator[None]:
    """Run the block with as much processor time and memory as the size of the call's tensors explains.

    For a process of a pool. When the time is over, the default action of SIGPROF ends it, inside a kernel too; the pool waits
    for `limit_s` in all. Allocations beyond the memory fail.
    """
    import torch

    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    size = sum(slot.count * DTYPES[slot.dtype].itemsize for slot in call.slots if slot.dtype in DTYPES)
    seconds = min(limit_s, max(_LEAST_S, limit_s * size / _BYTES_IN_LIMIT))
    threads = torch.get_num_threads() if size > _ONE_THREAD else 1
    stacks = _THREAD_BYTES * processors() if size > _ONE_THREAD else 0
    with at_most(_LEAST_BYTES + _TIMES_ITS_TENSORS * size + stacks):
        signal.setitimer(signal.ITIMER_PROF, seconds * threads)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def default_replay_bytes() -> int:
    """Return a quarter of the memory of this machine, or of the container that this process runs in."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # unknown on this system
        machine = 16 << 30
    for path in _CONTAINER:
        with suppress(OSError, ValueError):  # no such limit
            machine = min(machine, int(Path(path).read_text()))
    return machine // 4


def too_large(call: Call, most_bytes: int) -> str | None:
    """Return why a call is not replayed if its tensors need too much memory, else None."""
    return too_many(sum(slot.count for slot in call.slots), most_bytes)


def too_many(elements: int, most_bytes: int) -> str | None:
    """Return why a call with this many elements is not replayed, if it needs too much memory, else None."""
    needed = _BYTES_PER_ELEMENT * elements
    if needed <= most_bytes:
        return None
    return f"its replay needs about {size(needed)}, more than max_replay_bytes ({size(most_bytes)})"


def read_call(run: Run, step: int, rank: int, entry: Entry) -> StoredCall:
    """Return one call of a run."""
    segment = run.segment(step, rank)
    return StoredCall(
        segment.call_at(entry), step=step, rank=rank, index=entry.line, run=run.path, source=segment.source
    )

"""When to wait, before reading a run, for a recorder that has outlived its trainer.

From before it starts until it ends, the recorder holds an exclusive lock on the open `rank{R}.json` of its rank. If the
trainer is dead and the lock is still held, the recorder is emptying its buffers, and a short wait gives the complete
record. In all other cases nothing waits: a living trainer may go on for days, and a process on another machine cannot
be asked.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tensorprobe.errors import RunDamaged
from tensorprobe.model import RankPart
from tensorprobe.record.files import open_file

try:
    import fcntl
except ImportError:  # Windows has no flock, and there os.kill(pid, 0) would end the process instead of asking for it.
    fcntl = None  # type: ignore[assignment]

PATIENCE_S = 10.0
_PAUSE_S = 0.02
_LARGEST_PID = 2**31 - 1


def wait_for_recorder(root: Path, parts: Mapping[int, RankPart], *, patience_s: float = PATIENCE_S) -> bool:
    """Wait for recorders of dead trainers, at most `patience_s` seconds. Return whether it waited at all."""
    draining = [rank for rank, part in parts.items() if _trainer(part) == "dead" and _is_locked(root, rank)]
    deadline = time.monotonic() + patience_s
    for rank in draining:
        while _is_locked(root, rank) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
    return bool(draining)


def trainer_is_alive(part: RankPart) -> bool:
    """Return whether the part is open and its process runs on this machine; False also if that is unknown."""
    return _trainer(part) == "alive"


def _trainer(part: RankPart) -> Literal["alive", "dead", "unknown"]:
    """Return what became of the process that left the part open."""
    if part.closed or fcntl is None or part.host != socket.gethostname() or not 0 < part.pid <= _LARGEST_PID:
        return "unknown"
    try:
        os.kill(part.pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        return "alive"  # It is another user's, and there.
    return "alive"


def _is_locked(root: Path, rank: int) -> bool:
    try:
        descriptor = open_file(root, f"rank{rank}.json")
    except (FileNotFoundError, RunDamaged):
        return False  # Reading the file reports what is wrong with it.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # A file system without locks.
    finally:
        os.close(descriptor)
    return False

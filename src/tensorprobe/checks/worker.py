"""The life of a process that checks calls: it is told how to start, then calls come and outcomes go until the pipe is closed."""

from __future__ import annotations

import ctypes
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from tensorprobe.checks.messages import DONE, READY, REFUSED, Refusal, Start
from tensorprobe.checks.plan import Task
from tensorprobe.errors import TensorprobeError

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


def serve(descriptor: int) -> None:
    """Answer what comes through the connection until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    if sys.platform == "linux":
        # A call that hangs never looks at the pipe: when the parent is killed, the process must go all the same.
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with Connection(descriptor) as connection:
        try:
            _serve(connection)
        except (EOFError, OSError):
            return  # the parent has gone: nobody waits for anything


def _serve(connection: Connection) -> None:
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=Start)
    from tensorprobe.checks.checker import Checker  # imports torch, which the reader of this module may do without

    try:
        checker = Checker(start)
    except TensorprobeError as error:
        connection.send_bytes(REFUSED + msgspec.msgpack.encode(Refusal(type(error).__name__, str(error))))
        return
    connection.send_bytes(READY)
    tasks = msgspec.msgpack.Decoder(Task)
    with checker.conditions():
        ended = False
        while not ended:
            finished = checker.check(tasks.decode(connection.recv_bytes()))
            connection.send_bytes(DONE + msgspec.msgpack.encode(finished))
            ended = finished.ends

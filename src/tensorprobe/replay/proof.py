"""One call of both runs of a comparison, each side recomputed in float64 from its own recorded inputs.

In: where the call and its backward stand in each run. Out: for each side a judged row for every recorded output and gradient, or why
there is none. Runs in a process of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from tensorprobe.errors import TensorprobeError
from tensorprobe.record.run import Run
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.isolation import RunPlace, SideRows, SideTask, read_call
from tensorprobe.replay.runs import Conditions, prepare, said
from tensorprobe.work.pool import Reply

_RECORDED = Conditions("cpu", "real", "noise-aware", recorded=True)


def check_side(run: Run, task: SideTask) -> SideRows:
    """Return the judged outputs and gradients of one side."""
    try:
        call = read_call(run, task.step, task.rank, task.call)
        backward = None if task.backward is None else read_call(run, task.step, task.rank, task.backward)
        runs, _ = prepare(call, _RECORDED)
        if runs.random:
            return SideRows([], "it draws random numbers")
        return SideRows([*runs.check_forward(), *runs.check_backward(backward)])
    except (CannotReplay, TensorprobeError) as reason:
        return SideRows([], str(reason).splitlines()[0])
    except Exception as error:
        return SideRows([], f"its replay failed with {said(error)}")


@contextmanager
def serve_proofs(start: bytes, _progress: object) -> Iterator[object]:
    """Answer pairs of `SideTask`; a target of `work.pool`."""
    runs = [place.open() for place in msgspec.msgpack.decode(start, type=list[RunPlace])]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def answer(parcel: bytes) -> Reply:
        tasks = msgspec.msgpack.decode(parcel, type=list[SideTask])
        return Reply(msgspec.msgpack.encode([check_side(run, task) for run, task in zip(runs, tasks, strict=True)]))

    yield answer

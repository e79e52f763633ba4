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
from tensorprobe.model.precheck import CallCheck
from tensorprobe.record.run import Run
from tensorprobe.replay.failures import failure_script
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.isolation import ProofStart, Replayed, SideRows, SideTask, limited, read_call
from tensorprobe.replay.randomness import draws_random
from tensorprobe.replay.references import use_references
from tensorprobe.replay.runs import Conditions, prepare, said
from tensorprobe.work.pool import Reply, pack

_RECORDED = Conditions("cpu", "real", "noise-aware", recorded=True)


def check_side(run: Run, task: SideTask) -> SideRows:
    """Return the judged outputs and gradients of one side."""
    random = False
    try:
        call = read_call(run, task.step, task.rank, task.call)
        backward = None if task.backward is None else read_call(run, task.step, task.rank, task.backward)
        random = draws_random(call.model)
        with limited(call.model):
            runs, _ = prepare(call, _RECORDED)
            return SideRows([*runs.check_forward(), *runs.check_backward(backward)], random=random)
    except (CannotReplay, TensorprobeError) as reason:
        return SideRows([], str(reason).splitlines()[0], random)
    except Exception as error:
        return SideRows([], f"its replay failed with {said(error)}")


def replay_sides(runs: list[Run], tasks: list[SideTask]) -> Replayed:
    """Return what is wrong on each side, and the script of the one that is: the candidate, if both are."""
    sides = [check_side(run, task) for run, task in zip(runs, tasks, strict=True)]
    direction = "forward" if tasks[0].backward is None else "backward"
    for run, task, side in reversed(list(zip(runs, tasks, sides, strict=True))):
        wrong = [row for row in side.rows if row.result == "fail" and row.direction == direction]
        if not wrong:
            continue
        call = read_call(run, task.step, task.rank, task.call)
        backward = None if task.backward is None else read_call(run, task.step, task.rank, task.backward)
        check = CallCheck(
            call=call.name, op=call.op, step=call.step, rank=call.rank, line=call.index, module=call.module,
            forward="skip", backward="skip", message=wrong[0].message, details=side.rows, data="real",
        )  # fmt: skip
        try:
            script = failure_script(call, backward, _RECORDED, check)
        except CannotReplay as refused:
            return Replayed(sides, reason=str(refused))
        return Replayed(sides, script.text, script.tensors)
    reason = next((side.reason for side in sides if side.reason), "the recorded results are right for their inputs")
    return Replayed(sides, reason=reason)


@contextmanager
def serve_scripts(start: bytes, _progress: object) -> Iterator[object]:
    """Answer a pair of `SideTask` with `Replayed`; a target of `work.pool`."""
    with _serving(start) as runs:
        yield lambda parcel: Reply(pack(replay_sides(runs, msgspec.msgpack.decode(parcel, type=list[SideTask]))))


@contextmanager
def _serving(start: bytes) -> Iterator[list[Run]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin = msgspec.msgpack.decode(start, type=ProofStart)
    use_references(begin.references, begin.folders)
    yield [place.open() for place in begin.runs]


@contextmanager
def serve_proofs(start: bytes, _progress: object) -> Iterator[object]:
    """Answer pairs of `SideTask`; a target of `work.pool`."""
    with _serving(start) as runs:

        def answer(parcel: bytes) -> Reply:
            tasks = msgspec.msgpack.decode(parcel, type=list[SideTask])
            return Reply(pack([check_side(run, task) for run, task in zip(runs, tasks, strict=True)]))

        yield answer

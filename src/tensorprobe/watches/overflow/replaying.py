"""Replays a call that overflowed on the CPU, in its own dtype and in a wider one, and writes its replay script.

If the CPU overflows in the same dtype, the numbers are too large: normal. If it does not, the device is wrong: abnormal. Random
generators, autocast and modes of the process are not changed. Calls of a recorded run are replayed in a separate process.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from tensorprobe.errors import TensorprobeError
from tensorprobe.model import Call
from tensorprobe.model.interrupts import ignoring, let_through
from tensorprobe.model.overflow import FirstNonfinite, Verdict
from tensorprobe.model.reason import NotReplayed
from tensorprobe.model.silence import silent
from tensorprobe.numerics.summary import greatest_finite
from tensorprobe.ops import Trait, has
from tensorprobe.record.run import Entry, Run
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.isolation import RunPlace, default_replay_bytes, limited, read_call, replay_job
from tensorprobe.replay.once import Replay, outsized
from tensorprobe.replay.runs import said
from tensorprobe.replay.script import Results, make_script, place_line
from tensorprobe.taps.alone import private_graph, unseen
from tensorprobe.watches.overflow.keeping import KeptCall
from tensorprobe.watches.overflow.ledger import Finding
from tensorprobe.work.pool import Answer, Death, Reply, StartFailed, pack, run_in_processes

Tensors = Mapping[str, torch.Tensor]


class Judgement(NamedTuple):
    """`overflows`: whether the exact result exceeds the dtype or is not finite; None if unknown."""

    verdict: Verdict
    reason: str
    overflows: bool | None = None


class Recorded(msgspec.Struct, frozen=True):
    """The position of a call in a run, and that of its forward if it is a backward call."""

    step: int
    rank: int
    call: Entry
    forward: Entry | None = None


class _Start(msgspec.Struct, frozen=True):
    run: RunPlace
    most_bytes: int


def recorded_verdicts(run: Run, calls: Sequence[Recorded], most_bytes: int | None = None) -> list[Judgement]:
    """Judge calls with recorded values in a separate process. If that process dies, only the current call is lost."""
    found: dict[int, Judgement] = {}

    def take(number: int, content: bytes) -> None:
        found[number] = msgspec.msgpack.decode(content, type=Judgement)

    def died(death: Death) -> None:
        last = f": {death.last_line}" if death.last_line else ""
        found[death.number] = Judgement("unknown", f"its replay {death.how}{last}")

    most = most_bytes or default_replay_bytes()
    start = pack(_Start(RunPlace.of(run), most))
    job = replay_job("tensorprobe.watches.overflow.replaying:serve_verdicts", start, most_bytes=most)
    failed = ""
    try:
        run_in_processes(job, [pack(each) for each in calls], jobs=1, take=take, died=died)
    except StartFailed as error:
        failed = f"no process could be started to replay it: it {error}"
    return [found.get(number) or Judgement("unknown", failed) for number in range(len(calls))]


@contextlib.contextmanager
def serve_verdicts(start: bytes, _progress: object) -> Iterator[Answer]:
    """Answer with the verdict on recorded calls; a target of `work.pool`."""
    given = msgspec.msgpack.decode(start, type=_Start)
    run = given.run.open()

    def answer(parcel: bytes) -> Reply:
        asked = msgspec.msgpack.decode(parcel, type=Recorded)
        try:
            judged = _recorded_verdict(run, asked, given.most_bytes)
        except TensorprobeError as error:
            judged = Judgement("unknown", f"the call cannot be read: {str(error).splitlines()[0]}")
        return Reply(pack(judged))

    yield answer


def _recorded_verdict(run: Run, asked: Recorded, most_bytes: int) -> Judgement:
    call = read_call(run, asked.step, asked.rank, asked.call)
    forward = call if asked.forward is None else read_call(run, asked.step, asked.rank, asked.forward)
    with limited(forward.model):
        if reason := outsized(forward.model, most_bytes):
            return Judgement("unknown", reason)
        inputs = {slot.name: slot.tensor().clone() for slot in forward.inputs}
        found = {slot.name: slot.tensor() for slot in call.slots if slot.side != "input" and slot.has_data}
        gradients = None
        if asked.forward is not None:
            gradients = {f"output{slot.name[5:]}": slot.tensor().clone() for slot in call.inputs}
        return replay_verdict(forward.model, inputs, found, gradients=gradients)


def replay_verdict(
    call: Call,
    inputs: Tensors,
    found: Tensors | None = None,
    *,
    gradients: Tensors | None = None,
    device: str = "cpu",
) -> Judgement:
    """Judge a forward call, or, given the `gradients` of its outputs (by slot: output.0), its backward.

    `found` holds the results of the device by slot: outputs, or gradients of the inputs. Without it, the call runs on `device` now.
    """
    with _undisturbed():
        try:
            mine = _results(call, inputs, gradients, "cpu", "own")
            theirs = found if found is not None else _results(call, inputs, gradients, device, "own")
        except CannotReplay as reason:
            return Judgement("unknown", f"it cannot be run alone: {reason}")
        except Exception as error:  # an op may raise anything on the CPU; the report has the reason
            let_through(error)
            return Judgement("unknown", f"it cannot be run alone: {said(error)}")
        wide, precision = _wide(call, inputs, gradients)
        return _judge(call, mine, theirs, wide, precision)


def _judge(call: Call, mine: Tensors, theirs: Tensors, wide: Tensors, precision: str) -> Judgement:
    troubled = {slot: tensor for slot, tensor in theirs.items() if _peak(tensor) is not None and not _fits(tensor)}
    if not troubled:
        return Judgement("normal", "the result is finite", False)
    for slot, tensor in troubled.items():
        own = mine.get(slot)
        if own is None:  # an inner node of the backward; the replay shows only the whole
            bad = [name for name, result in mine.items() if not _fits(result)]
            slot = next(iter(bad or mine))
            own = mine[slot]
        dtype = str(tensor.dtype).removeprefix("torch.")
        limit = greatest_finite(dtype)
        exact = wide.get(slot)
        largest = None if exact is None else _peak(exact)
        if own.isfinite().all() and not (largest is not None and largest > limit):
            if has(call.op, Trait.RANDOM):
                return Judgement("unknown", "the call is random, and a replay draws other numbers")
            value = f"up to {_peak(own):.4g}"
            return Judgement("abnormal", f"the CPU returns finite numbers in {dtype}, {value} in {slot}", False)
        if largest is not None and largest == largest and largest != float("inf"):
            why = f"{slot} reaches {largest:.4g} in {precision}, beyond the {dtype} limit of {limit:.5g}: not a device fault"
            if largest <= limit:
                why = f"{dtype} overflows on the CPU too; {precision} reaches {largest:.4g}"
            return Judgement("normal", why, True)
        what = "NaN" if largest is not None and largest != largest else "inf"
        return Judgement("normal", f"{precision} gives {what} in {slot} too: not a device fault", True)
    raise AssertionError("unreachable: troubled is not empty")


def _fits(tensor: torch.Tensor) -> bool:
    """Return whether all values are below the limit of the dtype."""
    peak = _peak(tensor)
    return peak is not None and peak < torch.finfo(tensor.dtype).max


def _peak(tensor: torch.Tensor) -> float | None:
    """Return the largest magnitude, or NaN if there is one; None for integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return float(values.double().abs().amax()) if values.numel() else 0.0


def _wide(call: Call, inputs: Tensors, gradients: Tensors | None) -> tuple[Tensors, str]:
    """Return the results in float64, or float32 if the op has no such kernel; empty if it has neither."""
    for precision, name in (("double", "float64"), ("single", "float32")):
        with ignoring(Exception):  # no such kernel: try the narrower one
            return _results(call, inputs, gradients, "cpu", precision), name
    return {}, "float64"


def _results(call: Call, inputs: Tensors, gradients: Tensors | None, device: str, precision: str) -> Tensors:
    replay = Replay(call, inputs, device=device, precision=precision)
    results = replay.outputs if gradients is None else replay.gradients(gradients)
    if not results:
        raise CannotReplay("it returns no gradient" if gradients is not None else NotReplayed.NO_TENSOR)
    return {slot: tensor.detach().cpu() for slot, tensor in results.items()}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    with (
        unseen(),
        private_graph(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        silent(),
    ):
        yield


def save_script(kept: KeptCall, folder: Path) -> Path:
    """Write the replay script and its tensors; return its path. Raises CannotReplay if the call cannot be written."""
    first = kept.first
    floating = [slot for slot, tensor in kept.found().items() if tensor.is_floating_point() or tensor.is_complex()]
    about = [f"{first.call}: first {first.kind}. {first.verdict}: {first.reason}", place_line(first.step, first.rank)]
    about += [f"Module: {first.module}"] if first.module else []
    about += [f"Called at {first.frames[0]}"] if first.frames else []
    names = [slot if kept.forward is None else f"d input{slot[6:]}" for slot in floating]
    script = make_script(
        kept.replayed,
        kept.inputs(),
        kept.gradients() or {},
        Results(limits={name: {"nonfinite_different": 0.0} for name in names}),
        device=next((slot.device for slot in kept.call.slots), "cpu"),
        about=about,
    )
    return script.write(folder, f"step{first.step}.{first.call}")


def judge_finding(finding: Finding, folder: Path | None, *, replay: bool, notes: Counter[str]) -> None:
    """Give a finding its verdict and, if it can be replayed, its script."""
    kept: KeptCall | None = finding.kept
    fact = finding.fact
    if not isinstance(fact, FirstNonfinite):
        return
    if fact.verdict == "unknown":
        judged = _judge_kept(kept) if replay else Judgement("unknown", "replay is off")
        fact = msgspec.structs.replace(fact, verdict=judged.verdict, reason=judged.reason)
    if kept is not None:
        kept.first = fact
        if not kept.lacking and folder is not None and replay:
            try:
                script = save_script(kept, folder)
                fact = msgspec.structs.replace(fact, script=str(script))
            except (CannotReplay, OSError) as error:
                let_through(error)
                notes[f"{fact.call}: no replay script: {said(error)}"] += 1
        kept.first = fact
    finding.fact = fact


def _judge_kept(kept: KeptCall | None) -> Judgement:
    if kept is None:
        return Judgement("unknown", "a collective cannot be run alone")
    if kept.lacking:
        hint = f"; keep=[{kept.replayed.name!r}] keeps a copy the next time" if "keep_bytes" not in kept.lacking else ""
        return Judgement("unknown", f"{kept.lacking}, so it cannot be replayed{hint}")
    return replay_verdict(kept.replayed, kept.inputs(), kept.found(), gradients=kept.gradients())

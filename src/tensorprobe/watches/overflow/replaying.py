"""Normal or abnormal: a call that overflowed, run alone on the CPU, in its own dtype and in a wider one; and its script.

In: the call as a record has it, its inputs, what the device returned. Out: a verdict with its reason. If the CPU overflows in
the same dtype, the numbers are that large: normal. If it does not, the device is wrong: abnormal. Random generators, autocast
and modes of the process are left as they were. Calls of a recorded run are replayed in a process of their own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from tensorprobe.errors import TensorprobeError
from tensorprobe.model import Call
from tensorprobe.model.overflow import Birth, Verdict
from tensorprobe.numerics.summary import greatest_finite
from tensorprobe.ops import Trait, has
from tensorprobe.record.run import Entry, Run
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.isolation import RunPlace, default_replay_bytes, read_call, replay_job, too_large
from tensorprobe.replay.once import Replay
from tensorprobe.replay.runs import said
from tensorprobe.replay.script import Results, make_script, place_line
from tensorprobe.taps.alone import private_graph, unseen
from tensorprobe.watches.overflow.keeping import BornCall
from tensorprobe.watches.overflow.ledger import Finding
from tensorprobe.work.pool import Answer, Death, Reply, StartFailed, run_in_processes

Tensors = Mapping[str, torch.Tensor]


class Judgement(NamedTuple):
    """`overflows`: whether the exact result is beyond the dtype, or not finite; None when that is not known."""

    verdict: Verdict
    reason: str
    overflows: bool | None = None


class Recorded(msgspec.Struct, frozen=True):
    """Where a call stands in a run; of a backward call also its forward."""

    step: int
    rank: int
    call: Entry
    forward: Entry | None = None


def recorded_verdicts(run: Run, calls: Sequence[Recorded]) -> list[Judgement]:
    """Judge calls of a run, whose values were recorded, in a process of their own. One that dies takes nothing else along."""
    found: dict[int, Judgement] = {}

    def take(number: int, content: bytes) -> None:
        found[number] = msgspec.msgpack.decode(content, type=Judgement)

    def died(death: Death) -> None:
        last = f": {death.last_line}" if death.last_line else ""
        found[death.number] = Judgement("unknown", f"its replay {death.how}{last}")

    job = replay_job("tensorprobe.watches.overflow.replaying:serve_verdicts", msgspec.msgpack.encode(RunPlace.of(run)))
    failed = ""
    try:
        run_in_processes(job, [msgspec.msgpack.encode(each) for each in calls], jobs=1, take=take, died=died)
    except StartFailed as error:
        failed = f"no process could be started to replay it: it {error}"
    return [found.get(number) or Judgement("unknown", failed) for number in range(len(calls))]


@contextlib.contextmanager
def serve_verdicts(start: bytes, _progress: object) -> Iterator[Answer]:
    """Answer with the verdict on recorded calls; a target of `work.pool`."""
    run = msgspec.msgpack.decode(start, type=RunPlace).open()

    def answer(parcel: bytes) -> Reply:
        asked = msgspec.msgpack.decode(parcel, type=Recorded)
        try:
            judged = _recorded_verdict(run, asked)
        except TensorprobeError as error:
            judged = Judgement("unknown", f"it cannot be read: {str(error).splitlines()[0]}")
        return Reply(msgspec.msgpack.encode(judged))

    yield answer


def _recorded_verdict(run: Run, asked: Recorded) -> Judgement:
    call = read_call(run, asked.step, asked.rank, asked.call)
    forward = call if asked.forward is None else read_call(run, asked.step, asked.rank, asked.forward)
    if reason := too_large(forward.model, default_replay_bytes()):
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
    """Judge a forward call, or with the `gradients` of its outputs (by slot: output.0) its backward.

    `found` is what the device gave, by slot: outputs, or gradients of the inputs. Without it the call is run on `device` now.
    """
    with _undisturbed():
        try:
            mine = _results(call, inputs, gradients, "cpu", "own")
            theirs = found if found is not None else _results(call, inputs, gradients, device, "own")
        except CannotReplay as reason:
            return Judgement("unknown", f"it cannot be run alone: {reason}")
        except Exception as error:  # whatever an op may raise on the CPU: the reason stands in the report
            return Judgement("unknown", f"it cannot be run alone: {said(error)}")
        wide, precision = _wide(call, inputs, gradients)
        return _judge(call, mine, theirs, wide, precision)


def _judge(call: Call, mine: Tensors, theirs: Tensors, wide: Tensors, precision: str) -> Judgement:
    troubled = {slot: tensor for slot, tensor in theirs.items() if _peak(tensor) is not None and not _fits(tensor)}
    if not troubled:
        return Judgement("normal", "the result is finite", False)
    for slot, tensor in troubled.items():
        own = mine.get(slot)
        if own is None:  # a part of the backward: run alone, the whole is seen
            bad = [name for name, result in mine.items() if not _fits(result)]
            slot = next(iter(bad or mine))
            own = mine[slot]
        dtype = str(tensor.dtype).removeprefix("torch.")
        limit = greatest_finite(dtype)
        exact = wide.get(slot)
        largest = None if exact is None else _peak(exact)
        if own.isfinite().all() and not (largest is not None and largest > limit):
            if has(call.op, Trait.RANDOM):
                return Judgement("unknown", "it draws random numbers: run alone it draws others")
            value = f"up to {_peak(own):.4g}"
            return Judgement("abnormal", f"the CPU gives finite numbers in {dtype}, {value} in {slot}", False)
        if largest is not None and largest == largest and largest != float("inf"):
            why = f"{slot} reaches {largest:.4g} in {precision}, beyond the {dtype} limit of {limit:.5g}: not a device fault"
            if largest <= limit:
                why = f"{dtype} overflows on the CPU too; {precision} reaches {largest:.4g}"
            return Judgement("normal", why, True)
        what = "NaN" if largest is not None and largest != largest else "inf"
        return Judgement("normal", f"{slot}: {precision} gives {what} too: not a device fault", True)
    raise AssertionError("unreachable: troubled is not empty")


def _fits(tensor: torch.Tensor) -> bool:
    """Whether all is finite and below the limit of the dtype."""
    peak = _peak(tensor)
    return peak is not None and peak < torch.finfo(tensor.dtype).max


def _peak(tensor: torch.Tensor) -> float | None:
    """The greatest magnitude, NaN when there is one; None for what is not floating."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return float(values.double().abs().amax()) if values.numel() else 0.0


def _wide(call: Call, inputs: Tensors, gradients: Tensors | None) -> tuple[Tensors, str]:
    """The results in float64, or in float32 where the op has no such kernel; nothing where it has neither."""
    for precision, name in (("double", "float64"), ("single", "float32")):
        with contextlib.suppress(Exception):  # no such kernel: a narrower reference, or none, and the reason says less
            return _results(call, inputs, gradients, "cpu", precision), name
    return {}, "float64"


def _results(call: Call, inputs: Tensors, gradients: Tensors | None, device: str, precision: str) -> Tensors:
    replay = Replay(call, inputs, device=device, precision=precision)
    results = replay.outputs if gradients is None else replay.gradients(gradients)
    if not results:
        raise CannotReplay("it gives no gradient" if gradients is not None else "it gives no tensor")
    return {slot: tensor.detach().cpu() for slot, tensor in results.items()}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    with (
        unseen(),
        private_graph(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def save_birth(born: BornCall, folder: Path) -> Path:
    """Write the script and its tensors; return its path. CannotReplay where the call cannot be written down."""
    birth = born.birth
    floating = [slot for slot, tensor in born.found().items() if tensor.is_floating_point() or tensor.is_complex()]
    about = [f"{birth.call}: first {birth.kind}. {birth.verdict}: {birth.reason}", place_line(birth.step, birth.rank)]
    about += [f"Module: {birth.module}"] if birth.module else []
    about += [f"Called at {birth.frames[0]}"] if birth.frames else []
    names = [slot if born.forward is None else f"d input{slot[6:]}" for slot in floating]
    script = make_script(
        born.replayed,
        born.inputs(),
        born.gradients() or {},
        Results(limits={name: {"nonfinite_different": 0.0} for name in names}),
        device=next((slot.device for slot in born.call.slots), "cpu"),
        about=about,
    )
    return script.write(folder, f"step{birth.step}.{birth.call}")


def judge_birth(finding: Finding, folder: Path | None, *, replay: bool, notes: Counter[str]) -> None:
    """Give a birth its verdict and, where it can be run alone, its script."""
    born: BornCall | None = finding.born
    fact = finding.fact
    if not isinstance(fact, Birth):
        return
    if fact.verdict == "unknown":
        judged = _judge_kept(born) if replay else Judgement("unknown", "replay is off")
        fact = msgspec.structs.replace(fact, verdict=judged.verdict, reason=judged.reason)
    if born is not None:
        born.birth = fact
        if not born.lacking and folder is not None and replay:
            try:
                script = save_birth(born, folder)
                fact = msgspec.structs.replace(fact, script=str(script))
            except (CannotReplay, OSError) as error:
                notes[f"{fact.call}: no replay script: {said(error)}"] += 1
        born.birth = fact
    finding.fact = fact


def _judge_kept(born: BornCall | None) -> Judgement:
    if born is None:
        return Judgement("unknown", "a collective cannot be run alone")
    if born.lacking:
        hint = f"; keep=[{born.replayed.name!r}] keeps a copy the next time" if "keep_bytes" not in born.lacking else ""
        return Judgement("unknown", f"{born.lacking}, so it cannot be replayed{hint}")
    return replay_verdict(born.replayed, born.inputs(), born.found(), gradients=born.gradients())

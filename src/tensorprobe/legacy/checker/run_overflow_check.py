"""`run_overflow_check.py -forward F [-backward B]`: whether each overflow that was met in training is to be expected.

In: the files that an overflow check of ptdbg_ascend left, or any dump of api_accuracy_checker. Out: a line for each API.
Normal: the CPU overflows in the same dtype, the numbers are that large. Abnormal: only the device does. Nothing is written.
Exit code 0: nothing is abnormal, 1: something is, 2: nothing could be checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.checker import speak
from tensorprobe.legacy.checker.run_ut import find_device, set_jit_compile, spell
from tensorprobe.legacy.layouts.checker_reader import open_checker_files
from tensorprobe.model import Direction
from tensorprobe.model.call import forward_name
from tensorprobe.ops.names import underscored
from tensorprobe.record import Run
from tensorprobe.record.run import Entry
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import Data, all_recorded, make_inputs
from tensorprobe.replay.isolation import RunPlace, default_replay_bytes, limited, read_call, replay_job
from tensorprobe.report.ending import ended
from tensorprobe.text import printable
from tensorprobe.work.pool import Answer, Death, Reply, StartFailed, pack, run_in_processes

Verdict = Literal["normal", "abnormal", "unknown", "finite"]
"""finite: the call does not overflow, here and with these inputs."""
_LOST = "which may have been overwritten by the call itself"
_DRAWN = " (with random values of the recorded range: its own were not recorded)"


_SHIPPED = {
    "normal": "The {} overflow is a normal overflow. ",
    "abnormal": "The {} overflow is an abnormal overflow. ",
}
"""The sentence of the older tool, before our evidence."""


class Checked(NamedTuple):
    """What was found of one call in one direction. `call` is its canonical name, empty for an entry that cannot be read."""

    call: str
    direction: Direction
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        named = f"{spell(self.call)} {self.direction}: " if self.call else ""
        said = _SHIPPED.get(self.verdict, "").format(underscored(self.call)) if self.call else ""
        return f"{said}{named}{self.verdict}: {self.reason}"


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a process opens: a run, or the two files of a dump."""

    run: RunPlace
    backward: bytes | None = None
    is_files: bool = False
    device: str
    jit_compile: bool = False

    def open(self) -> Run:
        if not self.is_files:
            return self.run.open()
        backward = None if self.backward is None else Path(os.fsdecode(self.backward))
        return open_checker_files(Path(os.fsdecode(self.run.path)), backward)


class _Asked(msgspec.Struct, frozen=True):
    """A forward call, or with `backward` the backward of it."""

    step: int
    rank: int
    forward: Entry
    backward: Entry | None = None

    @property
    def named(self) -> tuple[str, Direction]:
        return (self.forward.name, "forward") if self.backward is None else (self.backward.name, "backward")


def check_overflow(
    forward: Path, backward: Path | None = None, *, device: str | None = None, jit_compile: bool = False
) -> list[Checked]:
    """Run every call of the dump again on the device and on the CPU. TensorprobeError for files that are none.

    A call that stands in the forward file only because its backward needs it is not in the list.
    """
    start = _Start(
        run=RunPlace(os.fsencode(forward.absolute())),
        backward=None if backward is None else os.fsencode(backward.absolute()),
        is_files=True,
        device=find_device() if device is None else device,
        jit_compile=jit_compile,
    )
    return _check_all(start.open(), start)


def check_calls(run: Run, *, device: str | None = None) -> list[Checked]:
    """The same for the calls of any run that holds their arguments; entries that cannot be read are unknown."""
    return _check_all(run, _Start(run=RunPlace.of(run), device=find_device() if device is None else device))


def _check_all(run: Run, start: _Start) -> list[Checked]:
    """Check the calls in a process of their own: one that dies is unknown, and takes nothing else along."""
    needed: set[str] = set()
    plan: list[_Asked | Checked] = []
    for step, rank in run.segments():
        forwards: dict[str, Entry] = {}
        backwards: dict[str, Entry] = {}
        for call in run.calls(step, rank, on_damage="skip"):
            held = forwards if call.direction == "forward" else backwards
            held.setdefault(call.name, Entry(call.index, call.name, call.repeat))
        needed |= {forward_name(name) for name in backwards}
        plan += [_Asked(step, rank, entry) for entry in forwards.values()]
        for name, entry in backwards.items():
            forward = forwards.get(forward_name(name))
            lost = Checked(name, "backward", "unknown", "its forward, with its arguments, is not in the forward file")
            plan.append(lost if forward is None else _Asked(step, rank, forward, entry))
        plan += [Checked("", "forward", "unknown", str(damage)) for damage in run.damage(step, rank)]
    found = iter(_replayed([each for each in plan if isinstance(each, _Asked)], start))
    checked = [next(found) if isinstance(each, _Asked) else each for each in plan]
    return [
        each for each in checked if (each.verdict, each.direction) != ("finite", "forward") or each.call not in needed
    ]


def _replayed(asked: Sequence[_Asked], start: _Start) -> list[Checked]:
    found: dict[int, Checked] = {}

    def take(number: int, content: bytes) -> None:
        found[number] = msgspec.msgpack.decode(content, type=Checked)

    def died(death: Death) -> None:
        last = f": {death.last_line}" if death.last_line else ""
        found[death.number] = Checked(*asked[death.number].named, "unknown", f"its replay {death.how}{last}")

    job = replay_job("tensorprobe.legacy.checker.run_overflow_check:serve", pack(start), device=start.device)
    try:
        run_in_processes(job, [pack(each) for each in asked], jobs=1, take=take, died=died)
    except StartFailed as failed:
        raise SettingsError(f"no process could begin on device {start.device!r}: it {failed}") from None
    return [found[number] for number in range(len(asked))]


@contextmanager
def serve(start: bytes, _progress: object) -> Iterator[Answer]:
    """Answer with what was found of one call; a target of `work.pool`."""
    given = msgspec.msgpack.decode(start, type=_Start)
    run = given.open()
    find_device()  # imports torch_npu, without which torch does not know its devices
    if given.jit_compile:
        set_jit_compile(given.device)

    def answer(parcel: bytes) -> Reply:
        asked = msgspec.msgpack.decode(parcel, type=_Asked)
        forward = read_call(run, asked.step, asked.rank, asked.forward)
        backward = None if asked.backward is None else read_call(run, asked.step, asked.rank, asked.backward)
        limit = limited(forward.model) if given.device == "cpu" else nullcontext()
        with limit:
            return Reply(pack(_check(forward, backward, given.device)))

    yield answer


def _check(call: StoredCall, backward: StoredCall | None, device: str) -> Checked:
    """One call: its forward, or its backward with the gradients that were recorded."""
    from tensorprobe.replay.once import outsized  # which imports torch
    from tensorprobe.watches.overflow.replaying import replay_verdict

    asked = call if backward is None else backward
    for slot in (*call.slots, *asked.slots):
        if slot.side != "output" and not slot.has_data and slot.summary is None:
            return Checked(asked.name, asked.direction, "unknown", f"nothing is recorded of {slot.name}, {_LOST}")
    if reason := outsized(call.model, default_replay_bytes()):
        return Checked(asked.name, asked.direction, "unknown", reason)
    drawn = not (all_recorded(call) and all_recorded(asked))
    data: Data = "random" if drawn else "real"
    try:
        inputs = make_inputs(call, data)
        gradients = None
        if backward is not None:
            gradients = {f"output{slot[5:]}": held for slot, held in make_inputs(backward, data).items()}
    except CannotReplay as why:
        return Checked(asked.name, asked.direction, "unknown", str(why))
    judged = replay_verdict(call.model, inputs, gradients=gradients, device=device)
    verdict: Verdict = judged.verdict
    reason = judged.reason
    if verdict == "normal" and judged.overflows is False:
        verdict, reason = "finite", f"it does not overflow on {device}"
    return Checked(asked.name, asked.direction, verdict, reason + (_DRAWN if drawn else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code comes back."""
    speak()
    return ended(lambda: _run(_parser().parse_args(arguments)), about="dump")


def _run(given: argparse.Namespace) -> int:
    device = find_device()
    backward = None if given.backward_info_file is None else Path(given.backward_info_file)
    counts: Counter[Verdict] = Counter()
    forward = Path(given.forward_info_file)
    for checked in check_overflow(forward, backward, device=device, jit_compile=given.jit_compile):
        sys.stdout.write(f"{printable(str(checked))}\n")
        counts[checked.verdict] += 1
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("normal", "abnormal", "unknown", "finite"))
    sys.stdout.write(f"{counts.total()} APIs on {device}: {said}\n")
    if counts["abnormal"]:
        return 1
    return 0 if counts["normal"] or counts["finite"] else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_overflow_check.py",
        description="Say of each API that overflowed whether that is normal.",
        allow_abbrev=False,
    )
    for side in ("forward", "backward"):
        parser.add_argument(
            f"-{side}",
            f"--{side}_input_file",
            f"--{side}_info_file",
            dest=f"{side}_info_file",
            required=side == "forward",
            metavar="FILE",
            help=f"{side}_info_{{pid}}.json",
        )
    parser.add_argument("-j", "-jit_compile", "--jit_compile", action="store_true", help="compile operators on the NPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())

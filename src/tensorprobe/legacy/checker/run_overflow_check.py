"""`run_overflow_check.py -forward F [-backward B]`: whether each overflow that was met in training is to be expected.

In: the files that an overflow check of ptdbg_ascend left, or any dump of api_accuracy_checker. Out: a line for each API.
Normal: the CPU overflows in the same dtype, the numbers are that large. Abnormal: only the device does. Nothing is written.
Exit code 0: nothing is abnormal, 1: something is, 2: nothing could be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tensorprobe.errors import TensorprobeError
from tensorprobe.legacy.checker import speak
from tensorprobe.legacy.checker.run_ut import find_device, set_jit_compile, spell
from tensorprobe.legacy.layouts.checker_reader import open_checker_files
from tensorprobe.model import Direction
from tensorprobe.model.call import forward_name
from tensorprobe.ops.names import underscored
from tensorprobe.record import Run
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import Data, all_recorded, make_inputs

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


def check_overflow(forward: Path, backward: Path | None = None, *, device: str | None = None) -> list[Checked]:
    """Run every call of the dump again on the device and on the CPU. TensorprobeError for files that are none.

    A call that stands in the forward file only because its backward needs it is not in the list.
    """
    return list(check_calls(open_checker_files(forward, backward), device=device))


def check_calls(run: Run, *, device: str | None = None) -> Iterator[Checked]:
    """The same for the calls of any run that holds their arguments; entries that cannot be read are unknown."""
    device = find_device() if device is None else device
    for step, rank in run.segments():
        forwards: dict[str, StoredCall] = {}
        backwards: dict[str, StoredCall] = {}
        for call in run.calls(step, rank, on_damage="skip"):
            (forwards if call.direction == "forward" else backwards).setdefault(call.name, call)
        needed = {forward_name(name) for name in backwards}
        for name, call in forwards.items():
            checked = _check(call, None, device)
            if checked.verdict != "finite" or name not in needed:
                yield checked
        for name, gradients in backwards.items():
            found = forwards.get(forward_name(name))
            if found is None:
                yield Checked(
                    name, "backward", "unknown", "its forward, with its arguments, is not in the forward file"
                )
            else:
                yield _check(found, gradients, device)
        for damage in run.damage(step, rank):
            yield Checked("", "forward", "unknown", str(damage))


def _check(call: StoredCall, backward: StoredCall | None, device: str) -> Checked:
    """One call: its forward, or its backward with the gradients that were recorded."""
    from tensorprobe.watches.overflow.replaying import replay_verdict  # which imports torch

    asked = call if backward is None else backward
    for slot in (*call.slots, *asked.slots):
        if slot.side != "output" and not slot.has_data and slot.summary is None:
            return Checked(asked.name, asked.direction, "unknown", f"nothing is recorded of {slot.name}, {_LOST}")
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
    given = _parser().parse_args(arguments)
    try:
        device = find_device()
        if given.jit_compile:
            set_jit_compile(device)
        backward = None if given.backward_info_file is None else Path(given.backward_info_file)
        counts: Counter[Verdict] = Counter()
        for checked in check_calls(open_checker_files(Path(given.forward_info_file), backward), device=device):
            sys.stdout.write(f"{checked}\n")
            counts[checked.verdict] += 1
    except TensorprobeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
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

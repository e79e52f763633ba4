"""Programs recorded in a moment, and a device of our own that is wrong on purpose.

`cpu:0` computes what `cpu` does and counts as another device, so that a check has all it has with an accelerator: the device,
the CPU in its own dtype and the reference. `planted` spoils what that device gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe
from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.model import Call
from tensorprobe.model.precheck import CallCheck
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay import runs
from tensorprobe.replay.once import Replay

HALF = pytest.param(torch.float16, marks=pytest.mark.needs_torch("2.4", "half precision on the CPU"))
DEVICE = "cpu:0"
Spoiler = Callable[[torch.Tensor], torch.Tensor]


def record(folder: Path, program: Callable[[], Any]) -> list[StoredCall]:
    """The forward calls of a program, in order."""
    with tensorprobe.capture(folder, level="api", mode="tensor", in_process=True, stacks=False, overwrite=True):
        program()
    run = tensorprobe.open_run(folder)
    return [call for call in run.calls() if call.direction == "forward"]


def record_one(folder: Path, program: Callable[[], Any], op: str = "") -> StoredCall:
    """The only call of a program, or the only one of that op."""
    found = [call for call in record(folder, program) if op in call.op]
    assert len(found) == 1, [call.name for call in found]
    return found[0]


def check(call: StoredCall, **settings: Any) -> CallCheck:
    """The verdict on the device of our own."""
    return check_call(call, None, CheckSettings(**{"device": DEVICE, **settings}))


def assert_passes(call: StoredCall, *, backward: str = "pass", **settings: Any) -> CallCheck:
    found = check(call, **settings)
    assert (found.forward, found.backward, found.message) == ("pass", backward, ""), found
    return found


def assert_skipped(call: StoredCall, reason: str, **settings: Any) -> None:
    found = check(call, **settings)
    assert (found.forward, found.backward) == ("skip", "skip")
    assert reason in found.message


@contextmanager
def planted(
    monkeypatch: pytest.MonkeyPatch, *, outputs: Spoiler | None = None, gradients: Spoiler | None = None
) -> Iterator[None]:
    """The device gives spoiled outputs, or spoiled gradients, inside the `with`."""

    class Spoiled(Replay):
        def __init__(self, call: Call, inputs: Mapping[str, torch.Tensor], **where: Any) -> None:
            super().__init__(call, inputs, **where)
            self._wrong = where.get("device") == DEVICE
            if self._wrong and outputs is not None:
                self.outputs = {name: outputs(output) for name, output in self.outputs.items()}

        def gradients(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found = super().gradients(given)
            if self._wrong and gradients is not None:
                return {name: gradients(gradient) for name, gradient in found.items()}
            return found

    with monkeypatch.context() as patched:
        patched.setattr(runs, "Replay", Spoiled)
        yield

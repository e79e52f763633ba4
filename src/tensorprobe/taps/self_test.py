"""A quick proof that capture works in this process: a tiny training is recorded, read back and compared with known numbers.

It runs before the program does, in a thread of its own: the program's modes, autocast and gradient settings do not reach
it, and it draws no random numbers. The run goes into a temporary folder that is removed again.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorprobe.errors import SelfTestFailed
from tensorprobe.fast import fast
from tensorprobe.model import CaptureLevel
from tensorprobe.record.apart import unseen_children
from tensorprobe.record.reader import open_run
from tensorprobe.record.run import Run
from tensorprobe.taps.probe import Probe

_INPUT = ((1.0, -2.0, 3.0), (4.0, 5.0, -6.0))
_WEIGHT = ((1.0, 2.0, -1.0), (-3.0, 1.0, 2.0))
_OUTPUT = ((-6.0, 1.0), (20.0, -19.0))
_GIVEN = ((1.0, 2.0), (-1.0, 3.0))
_PRODUCT = {
    "input": ("forward", _INPUT),
    "output": ("forward", _OUTPUT),
    "gradient of the output": ("backward", _GIVEN),
    "gradient of the input": ("backward", ((-5.0, 4.0, 3.0), (-10.0, 1.0, 7.0))),
    "gradient of the weight": ("backward", ((-3.0, -7.0, 9.0), (14.0, 11.0, -12.0))),
}
_EXPECTED = dict.fromkeys(CaptureLevel, _PRODUCT)
"""Level → what is looked for in its record: the name of a tensor, the direction of its call, its values."""
Expected = Mapping[str, tuple[str, tuple[tuple[float, ...], ...]]]
_TOLERANCE = 1e-6
_RING_BYTES = 1 << 20

_TORCH, _OURS = str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep
_passed: set[tuple[str, str, str]] = set()


def demand_working_capture(level: str, mode: str, device: str) -> None:
    """Run the self-test, once in a process for each level, mode and device; SelfTestFailed says what is missing or wrong."""
    key = (level, mode, device)
    call = getattr(nn.Module.__call__, "__code__", None)
    if key in _passed or call is None or not call.co_filename.startswith((_TORCH, _OURS)):
        return  # a function that the program has put in its place is not to see our call
    try:
        problem = find_problem(level, mode, device)
    except BaseException:  # the program does not leave the time, and need not wait for it again
        _passed.add(key)
        raise
    if problem:
        loops = "native" if fast is not None else "Python"
        raise SelfTestFailed(
            f"capture does not work here, nothing is recorded: {problem.rstrip('.')}.\n"
            f"  Level {level}, mode {mode}, device {device}, torch {torch.__version__}, {loops} loops.\n"
            "  See what works: tensorprobe doctor"
        )
    _passed.add(key)


def find_problem(level: str, mode: str, device: str) -> str:
    """Return what the self-test finds missing or wrong; empty if every value is right."""
    with tempfile.TemporaryDirectory(prefix="tensorprobe-self-test-", ignore_cleanup_errors=True) as folder:
        found: list[str] = []

        def run() -> None:
            try:
                record_known_calls(folder, level, mode, device)
                found.append(_check(open_run(folder), mode, _EXPECTED[CaptureLevel(level)]))
            except BaseException as error:
                found.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name="tensorprobe self-test")
        with unseen_children():
            thread.start()
            thread.join()
        return found[0]


class _Product(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        # Not by assignment, and called without hooks: those that the program has for all modules do not see this one.
        self._parameters["weight"] = nn.Parameter(torch.tensor(_WEIGHT, dtype=torch.float32, device=device))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.weight)

    _call_impl = forward


class _UncheckedProbe(Probe):
    is_self_test = True


def record_known_calls(folder: str, level: str, mode: str, device: str, *, wrong: bool = False) -> None:
    """Record a forward and a backward whose tensors are known; with `wrong`, one weight is another."""
    model = _Product(device)
    if wrong:
        model.weight.data[0, 0] = 1.5
    value = torch.tensor(_INPUT, dtype=torch.float32, device=device, requires_grad=True)
    given = torch.tensor(_GIVEN, dtype=torch.float32, device=device)
    settings: dict[str, Any] = {"level": level, "mode": mode, "stacks": False, "ring_bytes": _RING_BYTES}
    with contextlib.ExitStack() as kept:
        if device != "cpu":  # what a device may warn of; each new filter lets Python show again what it shows once
            kept.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        probe = _UncheckedProbe(folder, model=model, rank=0, overwrite=True, in_process=True, **settings)
        with probe:
            torch.autograd.backward(model(value), given)  # a program may have replaced `Tensor.backward`
    coverage = probe.coverage
    if coverage is None or coverage.failed or coverage.first_error:
        raise RuntimeError("no call was recorded" if coverage is None else coverage.first_error)


def _check(run: Run, mode: str, expected: Expected) -> str:
    """Return which of the known tensors is not in the run with the right values."""
    seen: dict[str, list[tuple[float, float, float]]] = {"forward": [], "backward": []}
    values: dict[str, list[Any]] = {"forward": [], "backward": []}
    for call in run.calls(0, 0):
        for slot in call.slots:
            summary = slot.model.summary
            if summary is not None:
                seen[str(call.direction)].append((float(summary.max), float(summary.min), float(summary.norm)))
            if slot.has_data:
                values[str(call.direction)].append(slot.numpy().tolist())
    if mode == "structure":
        found = {str(call.direction) for call in run.calls(0, 0)}
        directions = {direction for direction, _ in expected.values()}
        return "" if found == directions else f"only {sorted(found)} calls are in the record"
    for name, (direction, matrix) in expected.items():
        numbers = [number for row in matrix for number in row]
        wanted = (max(numbers), min(numbers), math.hypot(*numbers))
        if not any(_is_close(found, wanted) for found in seen[direction]):
            return f"the {name} of a product is missing from the record, or has wrong statistics"
        rows = [list(row) for row in matrix]
        if mode == "tensor" and rows not in values[direction] and _transposed(rows) not in values[direction]:
            return f"the {name} of a product has wrong values in the record"
    return ""


def _is_close(found: tuple[float, ...], wanted: tuple[float, ...]) -> bool:
    return all(abs(a - b) <= _TOLERANCE * abs(b) for a, b in zip(found, wanted, strict=True))


def _transposed(rows: list[list[float]]) -> list[list[float]]:
    """Return the known matrices as ATen calls see them, some of them transposed."""
    return [list(column) for column in zip(*rows, strict=True)]

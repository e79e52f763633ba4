"""`task: free_benchmark`: each API call once more with its inputs changed a little, against what it returned.

A row of `free_benchmark.csv` is an output that moved by more than the limit of its dtype: a call that amplifies small errors,
or a kernel that does not return the same twice. It names a risk, not a fault. The calls of a step are dumped into a folder
that is removed again, and replayed when the step stops: the program's own tensors and random numbers are not touched.
"""

from __future__ import annotations

import contextlib
import csv
import math
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.errors import TensorprobeError
from tensorprobe.legacy.checker.run_ut import find_device
from tensorprobe.legacy.msprobe import logger
from tensorprobe.legacy.msprobe.config import DumpConfig
from tensorprobe.model import Coverage
from tensorprobe.model.call import forward_name
from tensorprobe.model.interrupts import let_through
from tensorprobe.record import open_run
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.evidence import nudged
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import make_inputs, real
from tensorprobe.replay.once import Replay
from tensorprobe.replay.randomness import draws_random
from tensorprobe.text import counted, sheet_text

Tensors = Mapping[str, torch.Tensor]

FILE = "free_benchmark.csv"
_COLUMNS = ("rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index")
_LIMITS = {torch.float16: 0.002, torch.bfloat16: 0.004}
_LIMIT = 0.0002
_TINY = {torch.bfloat16: 1e-4, torch.float16: 1e-6, torch.float32: 1e-8, torch.float64: 1e-16}
"""What `add_noise` adds; elements below its square root are not compared."""
_TINY_GRADIENT = 1e-3
"""Gradients below are not compared."""


class FreeBenchmark:
    """The calls of one rank in one step. `begin` starts the dump of a task into a folder."""

    def __init__(self, config: DumpConfig, step: int, rank: int, model: Any, begin: Callable[[Path], Any]) -> None:
        self._config, self._step, self._rank = config, step, rank
        self._device = _device_of(model)
        config.dump_path.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=".free_benchmark-", dir=config.dump_path))
        self._checked, self._left = 0, Counter[str]()
        try:
            self._dump = begin(self._scratch / "step0" / "rank0")
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        self.numbers: dict[str, int] = {}

    def stop(self) -> Coverage | None:
        """End the dump, replay what it holds, write the rows, and remove it."""
        coverage: Coverage | None = self._dump.stop()
        self.numbers = self._dump.numbers
        if coverage is None:
            return None  # a forked child: the dump is its parent's
        try:
            with torch_names.no_overrides(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._write(self._rows())
        except (OSError, TensorprobeError) as error:
            let_through(error)
            logger.error("free_benchmark: step %d is not checked: %s", self._step, error)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return None

    def _rows(self) -> list[list[Any]]:
        run = open_run(self._scratch)
        backward = self._config.fuzz_stage == "backward"
        given = {forward_name(call.name): call for call in run.calls() if forward_name(call.name)} if backward else {}
        rows: list[list[Any]] = []
        for call in run.calls():
            if call.direction != "forward" or (backward and call.name not in given):
                continue
            try:
                rows += self._check(call, given.get(call.name))
                self._checked += 1
            except (CannotReplay, RuntimeError, TypeError, ValueError) as error:
                let_through(error)
                self._left[str(error).splitlines()[0][:120] if str(error) else type(error).__name__] += 1
        return rows

    def _check(self, call: StoredCall, backward: StoredCall | None) -> list[list[Any]]:
        if draws_random(call.model):
            raise CannotReplay("it draws random numbers")
        inputs = make_inputs(call, "real")
        before, after = (
            self._run(call, inputs, backward, perturbed=False),
            self._run(call, inputs, backward, perturbed=True),
        )
        several = len(before) > 1
        rows = []
        for place, (name, was) in enumerate(before.items()):
            ratio = _ratio(was, after[name], backward is not None) if name in after else math.inf
            if ratio - 1 > (0.0 if self._config.pert_mode == "no_change" else _LIMITS.get(was.dtype, _LIMIT)):
                found = (ratio - 1, str(was.dtype), str(was.shape), place if several else "")
                shown = backward or call
                rows.append(
                    [self._rank, self._config.pert_mode, shown.direction, self._step, sheet_text(shown.name), *found]
                )
        return rows

    def _run(self, call: StoredCall, inputs: Tensors, backward: StoredCall | None, *, perturbed: bool) -> Tensors:
        """Outputs or gradients; those that the program got, where they are known and nothing is changed."""
        mode = self._config.pert_mode
        if not perturbed and backward is None:
            return {slot.name: real(slot) for slot in call.outputs if slot.has_data and _is_float(slot.dtype)}
        device, precision = self._device, "own"
        if perturbed and mode == "improve_precision":
            if not any(tensor.dtype in _LIMITS for tensor in inputs.values()):
                raise CannotReplay("its inputs are not in half precision")
            precision = "single"
        elif perturbed and mode == "to_cpu":
            device = "cpu"
        elif perturbed and mode == "bit_noise":
            inputs = nudged(inputs, call.name, sparse=False)
        elif perturbed and mode == "add_noise":
            inputs = {name: _with_noise(tensor) for name, tensor in inputs.items()}
        replay = Replay(call.model, inputs, device=device, precision=precision)
        if backward is None:
            return replay.outputs
        coming = {slot.name.replace("input", "output", 1): real(slot) for slot in backward.inputs if slot.has_data}
        return replay.gradients(coming)

    def _write(self, rows: list[list[Any]]) -> None:
        path = self._config.dump_path / FILE
        if rows:
            with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(",".join(_COLUMNS) + "\n")  # by one of the ranks
            with path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
        where = f", in '{path}'" if rows else ""
        logger.info(
            "free_benchmark, step %d, %s: %s checked, %s beyond the limit%s.",
            self._step,
            self._config.pert_mode,
            counted(self._checked, "call"),
            counted(len(rows), "output"),
            where,
        )
        for reason, count in self._left.most_common():
            logger.info("free_benchmark: %s not checked: %s.", counted(count, "call"), reason)


def _ratio(was: torch.Tensor, now: torch.Tensor, is_gradient: bool) -> float:
    """How many times as large the one is as the other, at worst; infinite if a sign or a shape changed."""
    tiny = _TINY_GRADIENT if is_gradient else math.sqrt(_TINY.get(was.dtype, _TINY[torch.float32]))
    one, other = was.detach().cpu().double(), now.detach().cpu().double()
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    counted = one.isfinite() & ((one.abs() > tiny) | (other.abs() > tiny))
    one, other = one[counted], other[counted]
    if not one.numel():
        return 1.0
    if ((one * other < 0) & (one.abs().minimum(other.abs()) > tiny)).any():
        return math.inf
    large, small = one.abs().maximum(other.abs()), one.abs().minimum(other.abs())
    return max(1.0, float(((large + tiny) / (small + tiny)).max()))


def _with_noise(tensor: torch.Tensor) -> torch.Tensor:
    tiny = _TINY.get(tensor.dtype)
    return tensor if tiny is None else torch.where(tensor.abs() > tiny, tensor + tiny, tensor)


def _is_float(dtype: str) -> bool:
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point


def _device_of(model: Any) -> str:
    """Where the calls were made: a dump does not say it."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
    first = next(parameters, None)
    return find_device() if first is None else str(first.device)

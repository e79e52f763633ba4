"""`task: grad_probe`: statistics and signs of the gradients at each optimizer step, and the comparison of two such dumps.

A step is a call of an optimizer, whatever the program calls a step. Gradients are read before the optimizer uses them, and
nothing is changed. After `monitor` nothing is raised: what cannot be written is logged, and the training goes on.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch

from tensorprobe import torch_names
from tensorprobe.errors import RunNotFound, SettingsError, TensorDamaged
from tensorprobe.legacy.msprobe import logger, speak
from tensorprobe.legacy.msprobe.config import DumpConfig
from tensorprobe.model import DTYPES
from tensorprobe.model.interrupts import let_through
from tensorprobe.numerics.summary import summarize_buffer
from tensorprobe.record.export import safe_file_name
from tensorprobe.taps.ranks import find_rank
from tensorprobe.taps.step_taps import RegionTap
from tensorprobe.text import sheet_text

_SIMILAR, _FALL = 0.97, 0.03
"""The rule of the guide: the first step is at least so similar, and no later step falls by more."""
_SUMMARY = "summary"


class GradientProbe:
    """The gradients of one model, from `monitor` on to the end of the program."""

    def __init__(self, config: DumpConfig, model: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise SettingsError(f"monitor takes the model, a torch.nn.Module; got {type(model).__name__}.")
        self._config = config
        named = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        wanted = config.param_list
        if unknown := sorted({*wanted} - {name for name, _ in named}):
            raise SettingsError(f"param_list names {unknown[0]!r}, which the model does not have.")
        self._parameters = [(name, parameter) for name, parameter in named if not wanted or name in wanted]
        self._step, self._pid = 0, os.getpid()
        self._tap = RegionTap(self._entered)
        self._tap.install()

    def remove(self) -> None:
        """Watch the optimizers no more."""
        self._tap.remove()

    def _entered(self, region: str | None) -> None:
        if region != "optimizer" or os.getpid() != self._pid:
            return
        step, self._step = self._step, self._step + 1
        rank, wanted = find_rank(), self._config
        if (wanted.rank and rank not in wanted.rank) or (wanted.step and step not in wanted.step):
            return
        try:
            with torch_names.no_overrides(), torch.no_grad():
                self._write(wanted.dump_path / f"rank{rank}", step)
        except Exception as error:  # of the disk, or of a tensor of an unknown kind: the training goes on
            let_through(error)
            logger.error("The gradients of step %d are not written: %s: %s", step, type(error).__name__, error)

    def _write(self, folder: Path, step: int) -> None:
        rows: list[list[Any]] = []
        taken: dict[str, int] = {}
        signs = folder / f"step{step}"
        (folder if self._config.grad_level == "L0" else signs).mkdir(parents=True, exist_ok=True)
        for name, reference in self._parameters:
            gradient = _gradient_of(reference())
            if gradient is None:
                continue
            gradient = gradient.detach().cpu()
            if self._config.grad_level != "L0":
                numpy.save(signs / safe_file_name(name, ".npy", taken), (gradient > 0).numpy())
            rows.append([sheet_text(name), *self._figures(gradient.contiguous())])
        path = folder / f"grad_summary_{step}.csv"
        _write_csv(path, [["param_name", *self._titles()], *rows])
        logger.info("The gradients of %d parameters are written to '%s'.", len(rows), path)

    def _titles(self) -> list[str]:
        level, bounds = self._config.grad_level, self._config.bounds
        ends = ["(-inf", *(f"({bound}" for bound in bounds)]
        intervals = [f"{low}, {high}]" for low, high in zip(ends, bounds, strict=False)] + [f"{ends[-1]}, inf)", "=0"]
        first = {"L0": ["MD5"], "L1": [], "L2": intervals}[level]
        return [*first, "max", "min", "norm", "shape"]

    def _figures(self, gradient: torch.Tensor) -> list[Any]:
        level, count = self._config.grad_level, max(1, gradient.numel())
        first: list[Any] = []
        if level == "L0":
            first = [hashlib.md5(gradient.float().numpy().tobytes(), usedforsecurity=False).hexdigest()]
        elif level == "L2":
            places = torch.bucketize(gradient.double(), torch.tensor(self._config.bounds, dtype=torch.float64))
            shares = torch.bincount(places.reshape(-1), minlength=len(self._config.bounds) + 1) / count
            first = [*shares.tolist(), (gradient == 0).sum().item() / count]
        content = memoryview(gradient.reshape(-1).view(torch.uint8).numpy()).cast("B") if gradient.numel() else b""
        summary = summarize_buffer(memoryview(content), DTYPES[str(gradient.dtype).removeprefix("torch.")])
        return [*first, summary.max, summary.min, summary.norm, [*gradient.shape]]


def _gradient_of(parameter: Any) -> torch.Tensor | None:
    """Megatron and its kin keep the gradient that the optimizer uses in `main_grad`."""
    found = getattr(parameter, "main_grad", None)
    found = getattr(parameter, "grad", None) if found is None else found
    if not isinstance(found, torch.Tensor):
        return None
    local = found.to_local() if hasattr(found, "to_local") else found  # a statistic of a DTensor is a collective
    return local.to_dense() if local.layout is not torch.strided else local


class GradComparator:
    """Two dumps of gradients: in which share of their elements the signs are the same, for each step and parameter."""

    @classmethod
    def compare_distributed(cls, path1: str, path2: str, output_dir: str) -> dict[int, Path]:
        """Compare all ranks of two dumps; return the path of each rank's table."""
        ranks = _in_both(path1, path2, "rank")
        out = Path(output_dir)
        return {
            rank: cls.compare(f"{path1}/rank{rank}", f"{path2}/rank{rank}", str(out / f"rank{rank}")) for rank in ranks
        }

    @classmethod
    def compare(cls, path1: str, path2: str, output_dir: str) -> Path:
        """Compare one rank: write `similarities.csv`, log where the rule of the guide sees a problem, return the path."""
        speak()
        steps = _in_both(path1, path2, "step")
        tables = [[_signs(Path(path) / f"step{step}") for step in steps] for path in (path1, path2)]
        names = dict.fromkeys(name for table in tables for files in table for name in files)
        rows: dict[str, list[float | str]] = {name: [] for name in names}
        whole: list[float | str] = []
        for one, other in zip(*tables, strict=True):
            same = total = 0
            for name in names:
                if name not in one or name not in other:
                    rows[name].append("Unmatched")
                    continue
                equal, count = _agreement(one[name], other[name])
                same, total = same + equal, total + count
                rows[name].append(equal / count if count else 1.0)
            whole.append(same / total if total else 1.0)
        rows[_SUMMARY] = whole
        _report(rows, steps)
        path = Path(output_dir) / "similarities.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_csv(path, [["step", *steps], *([sheet_text(name), *values] for name, values in rows.items())])
        return path


def _in_both(one: str, other: str, kind: str) -> list[int]:
    found = []
    for path in (one, other):
        try:
            names = [entry.name for entry in Path(path).iterdir()]
        except OSError as error:
            raise RunNotFound(f"'{path}' cannot be read: {error.strerror}.") from None
        found.append({int(name[len(kind) :]) for name in names if re.fullmatch(f"{kind}[0-9]{{1,9}}", name)})
    if not found[0] & found[1]:
        raise RunNotFound(f"'{one}' and '{other}' have no folder {kind}N in common. grad_level L0 writes no signs.")
    for path, left in ((one, found[0] - found[1]), (other, found[1] - found[0])):
        if left:
            logger.warning("Only '%s' has %s %s.", path, kind, ", ".join(map(str, sorted(left))))
    return sorted(found[0] & found[1])


def _signs(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.npy"))}


def _agreement(one: Path, other: Path) -> tuple[int, int]:
    arrays = []
    for path in (one, other):
        try:
            array = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise TensorDamaged(f"'{path}' cannot be read: {error}") from None
        if array.dtype != numpy.bool_:
            raise TensorDamaged(f"'{path}' has dtype {array.dtype}; the signs of a gradient are bool.")
        arrays.append(array)
    if arrays[0].shape != arrays[1].shape:
        return 0, max(array.size for array in arrays)
    return int((arrays[0] == arrays[1]).sum()), arrays[0].size


def _report(rows: dict[str, list[float | str]], steps: Sequence[int]) -> None:
    for name, values in rows.items():
        numbers = [(step, value) for step, value in zip(steps, values, strict=True) if isinstance(value, float)]
        if numbers and numbers[0][1] < _SIMILAR:
            logger.warning("Step %d, %s: similarity %.4f, below %s.", numbers[0][0], name, numbers[0][1], _SIMILAR)
        for (_, before), (step, now) in pairwise(numbers):
            if before - now > _FALL:
                logger.warning("Step %d, %s: similarity falls from %.4f to %.4f.", step, name, before, now)
        for step, value in zip(steps, values, strict=True):
            if value == "Unmatched":
                logger.warning("Step %d, %s: only one of the two dumps has it.", step, name)


def _write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)

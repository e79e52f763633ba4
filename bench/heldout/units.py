"""What one process measures: all cases of one family, or of one pair of programs. Right runs are recorded once and shared."""

from __future__ import annotations

import math
import resource
import signal
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.heldout import answer as answers
from bench.heldout import record, truth
from bench.heldout.cases import Fault, Pair, Setting, healthy_settings
from bench.heldout.record import Program
from bench.heldout.training import Entry

Case = dict[str, Any]


@dataclass
class Unit:
    """Cases that share runs. Exactly one of `entry` and `pair` is there."""

    part: str
    name: str
    entry: Entry | None = None
    pair: Pair | None = None
    faults: list[Fault] = field(default_factory=list)
    healthy: bool = True
    settings: str = ""
    """Only settings whose name holds this text."""
    sample: int = 100
    """Per cent of the cases that are measured: the same ones each time."""

    def wants(self, name: str, setting: Setting) -> bool:
        draw = zlib.crc32(f"{name} in {setting.name}".encode()) % 100
        return self.settings in setting.name and draw < self.sample

    def run(self) -> list[Case]:
        """Measure all cases in this process, with all runs in a folder that is removed afterwards."""
        signal.alarm(0)  # many cases: each of its own processes has a limit
        with tempfile.TemporaryDirectory() as folder:
            runs = _Runs(Path(folder))
            return list(_family_cases(self, self.entry, runs) if self.entry else _pair_cases(self, self.pair, runs))


class _Runs:
    """Right runs by program, device and record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[Any, Path] = {}
        self.losses: dict[Path, float] = {}
        self._said: dict[tuple[Path, Path], Case] = {}

    def right(self, program: Program, where: str, setting: Setting, *, again: bool = False) -> Path:
        key = (again, program, where, setting.level, setting.mode, setting.modules)
        if key not in self._made:
            path = self.folder / f"right{len(self._made)}"
            self.losses[path] = record.record(path, program, where, setting).loss
            self._made[key] = path
        return self._made[key]

    def healthy(self, baseline: Path, right: Path, **options: Any) -> Case:
        """What is said of the two programs without a fault."""
        if (baseline, right) not in self._said:
            self._said[baseline, right] = record.compare(baseline, right, **options)
        return self._said[baseline, right]

    def wrong(self, program: Program, where: str, setting: Setting) -> tuple[Path, int]:
        return self.folder / "wrong", record.record(self.folder / "wrong", program, where, setting).struck


def _family_cases(unit: Unit, entry: Entry, runs: _Runs) -> Iterator[Case]:
    for precision in entry.precisions.split():
        program = Program(entry.build, precision, ranks=entry.ranks)
        for setting in healthy_settings(entry, precision) if unit.healthy else ():
            about = {"name": f"{unit.name}/{precision}", "section": "healthy", "kind": "healthy"}
            if unit.wants(about["name"], setting):
                yield _guarded(_healthy, unit, setting, about, program, program, runs)
    for fault in unit.faults:
        program = Program(entry.build, fault.precision, fault.steps, entry.ranks)
        for setting in fault.settings():
            if unit.wants(fault.name, setting):
                about = {"name": fault.name, "section": "fault", "kind": fault.kind}
                yield _guarded(_fault, unit, setting, about, program, program, fault, runs)


def _pair_cases(unit: Unit, pair: Pair | None, runs: _Runs) -> Iterator[Case]:
    assert pair is not None
    for setting in pair.settings():
        one, other = (
            Program(build, pair.precision, ranks=ranks)
            for build, ranks in zip((pair.baseline, pair.candidate), pair.ranks, strict=True)
        )
        if unit.healthy and unit.wants(pair.name, setting):
            about = {"name": pair.name, "section": "programs", "kind": "healthy"}
            yield _guarded(_healthy, unit, setting, about, one, other, runs)
        for fault in unit.faults:
            programs = (replace(one, steps=fault.steps), replace(other, steps=fault.steps))
            about = {"name": f"{pair.name}: {fault.about}", "section": "programs", "kind": fault.kind}
            if unit.wants(about["name"], setting):
                yield _guarded(_fault, unit, setting, about, *programs, fault, runs)


def _guarded(measure: Callable[..., Case], unit: Unit, setting: Setting, about: Case, *args: Any) -> Case:
    """A case, with what it took. A program that fails is an error of the benchmark, and is counted as one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    case = {"part": unit.part, "setting": setting.name, **about}
    try:
        case |= measure(unit, setting, *args)
    except Exception:
        case |= {"outcome": "error", "said": traceback.format_exc()[-1500:]}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    case["cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)
    return case


def _healthy(unit: Unit, setting: Setting, one: Program, other: Program, runs: _Runs) -> Case:
    baseline = runs.right(one, setting.baseline, setting)
    same = one == other and setting.baseline == setting.candidate
    candidate = runs.right(other, setting.candidate, setting, again=same)
    near = 1e-4 if one.precision == "fp32" else 0.02
    if unit.pair is not None and not math.isclose(runs.losses[baseline], runs.losses[candidate], rel_tol=near):
        raise RuntimeError(f"other losses: {runs.losses[baseline]}, {runs.losses[candidate]}")
    said = runs.healthy(baseline, candidate, **_options(unit, runs))
    return {"outcome": answers.judge_healthy(said), **_said(said)}


def _fault(unit: Unit, setting: Setting, one: Program, other: Program, fault: Fault, runs: _Runs) -> Case:
    baseline = runs.right(one, setting.baseline, setting)
    planted = replace(other, plant=fault.plant)
    measured = replace(setting, mode="tensor")  # the size of a fault needs values
    right = runs.right(other, setting.candidate, measured)
    wrong, struck = runs.wrong(planted, setting.candidate, measured)
    found = truth.find_truth(right, runs.right(other, setting.candidate, measured, again=True), wrong)
    if not struck or not found.calls:
        raise RuntimeError(f"the fault struck {struck} times and changed {len(found.calls)} calls")
    if unit.pair is not None:
        truth.add_region(found, baseline, right)
    if setting.mode != "tensor":
        wrong, _ = runs.wrong(planted, setting.candidate, setting)
    said = record.compare(baseline, wrong, **_options(unit, runs))
    outcome = answers.judge_fault(said, found, fault.parameters)
    if unit.pair is not None and answers.same_place(said, runs.healthy(baseline, right, **_options(unit, runs))):
        outcome = "unlocated"  # the answer would be the same without the fault
    return {
        "outcome": outcome,
        "above": found.above,
        "outside": found.outside,
        "truth": found.as_dict(),
        **_said(said),
    }


def _said(said: dict[str, Any]) -> Case:
    status = (said.get("divergence") or {}).get("status", "nothing")
    return {"status": status, "said": answers.describe(said), "exit_code": said["exit_code"]}


def _options(unit: Unit, runs: _Runs) -> dict[str, Any]:
    if unit.pair is None or not unit.pair.map:
        return {}
    path = runs.folder / "names.map"
    path.write_text(unit.pair.map)
    return {"map": path}

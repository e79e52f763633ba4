"""What is measured: planted faults, healthy pairs, and pairs of different programs; and in which settings."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal

from bench.heldout.plant import Plant
from bench.heldout.training import Entry, Family

PARTS = ("open", "closed", "drawn")
Device = Literal["cpu", "threads", "second", "npu"]
"""The CPU, the CPU with another number of threads, the second right device, the simulated one."""


@dataclass(frozen=True)
class Setting:
    """How two runs are made: on which devices, and what is recorded of them."""

    baseline: Device = "cpu"
    candidate: Device = "cpu"
    level: str = "api"
    mode: str = "tensor"
    modules: bool = False
    """Whether only calls inside modules are recorded, so no optimizer: `capture --module`."""

    @property
    def name(self) -> str:
        """As the tables call it: `across api`, `same summary`, `cpu/npu aten`."""
        where = {("cpu", "cpu"): "same", ("second", "second"): "same", ("cpu", "second"): "across"}
        record = "summary" if self.mode == "summary" else "modules" if self.modules else self.level
        return f"{where.get((self.baseline, self.candidate), f'{self.baseline}/{self.candidate}')} {record}"


RECORDS: tuple[dict[str, str], ...] = (
    {"level": "api"},
    {"level": "mix"},
    {"level": "aten"},
    {"level": "module"},
    {"level": "api", "mode": "summary"},
)


@dataclass(frozen=True)
class Fault:
    """A fault planted into a family, or into the candidate of a pair of programs."""

    family: str
    kind: str
    about: str
    plant: Plant
    precision: str = "fp32"
    steps: int = 2
    parameters: tuple[str, ...] = ()
    """Parameters (globs) whose values or gradients differ without a recorded call that made them: naming one is right."""
    modules: bool = False
    """Whether it is also measured with the optimizer out of the record."""

    @property
    def name(self) -> str:
        return f"{self.family}/{self.precision}: {self.about}"

    def settings(self) -> list[Setting]:
        """One device and across at level api, and two more that depend on the name alone."""
        draw = random.Random(zlib.crc32(self.name.encode()))
        more = [Setting("cpu", where, **record) for where in ("cpu", "second") for record in RECORDS[1:]]
        chosen = [Setting("cpu", "cpu"), Setting("cpu", "second"), *draw.sample(more, 2)]
        return chosen + [Setting("cpu", where, modules=True) for where in ("cpu", "second") if self.modules]


@dataclass(frozen=True)
class Pair:
    """Two programs of one model. Faults are planted into the candidate."""

    name: str
    baseline: Family
    candidate: Family
    faults: tuple[Fault, ...] = ()
    ranks: tuple[int, int] = (1, 1)
    level: str = "api"
    precision: str = "fp32"
    map: str = ""
    """Text of a map of names, for programs that name their modules otherwise."""

    def settings(self) -> list[Setting]:
        return [Setting("cpu", where, level=self.level) for where in ("cpu", "second")]


def planted(kind: str, about: str, plant: Plant, *parameters: str) -> Fault:
    """A fault of a pair of programs. Its kind says where: inside a region, at its border, behind it, in the optimizer."""
    return Fault("", kind, about, plant, parameters=parameters)


def healthy_settings(entry: Entry, precision: str) -> list[Setting]:
    """Every pair of devices with every record; for further precisions of a family, level api and aten."""
    first = precision == entry.precisions.split()[0]
    devices: tuple[Device, ...] = ("cpu", "threads", "second", "npu") if entry.ranks == 1 else ("cpu", "second")
    records = RECORDS if first else (RECORDS[0], RECORDS[2])
    return [Setting("cpu", device, **record) for device in devices for record in records]


def families(part: str) -> dict[str, Entry]:
    """Return all families of a part. Imports transformers."""
    return {name: entry for each in _modules(part) for name, entry in getattr(each, "FAMILIES", {}).items()}


def faults(part: str) -> list[Fault]:
    return [fault for each in _modules(part) for fault in getattr(each, "FAULTS", ())]


def pairs(part: str) -> list[Pair]:
    return [pair for each in _modules(part) for pair in getattr(each, "PAIRS", ())]


def _modules(part: str) -> list[ModuleType]:
    package = import_module(f"bench.heldout.{part}")
    return [import_module(f"{package.__name__}.{each.name}") for each in iter_modules(package.__path__)]

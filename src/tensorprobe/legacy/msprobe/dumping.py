"""One rank of one step as it is dumped: from the settings to a probe that writes in msprobe's layout.

A step may be dumped in several turns: each goes on in the files of the one before, and so do the numbers of calls.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.layouts.forms import MsprobeForm
from tensorprobe.legacy.msprobe.config import DumpConfig
from tensorprobe.legacy.msprobe.overflow import start_overflow
from tensorprobe.model import Coverage
from tensorprobe.taps import Probe, active_probe
from tensorprobe.taps.module_names import class_name
from tensorprobe.taps.operators import OlderWays
from tensorprobe.taps.ranks import find_rank

_LEVELS = {"L0": "module", "L1": "api", "L2": "aten", "mix": "mix"}


class Dump(Protocol):
    """A dump that is under way."""

    numbers: dict[str, int]

    def stop(self) -> Coverage | None:
        """End it and wait until it is on disk."""


def find_place(config: DumpConfig, step: int, rank: int | None) -> tuple[Path, int]:
    """The folder of this process in a step, and its rank. A process that torch.distributed does not know has its number."""
    known = rank is not None or (torch.distributed.is_available() and torch.distributed.is_initialized())
    number = find_rank() if rank is None else rank
    name = f"rank{number}" if known else f"proc{os.getpid()}"
    return config.dump_path.absolute() / f"step{step}" / name, number


def begin(
    config: DumpConfig, folder: Path, *, rank: int, model: Any, only: tuple[Any, str] | None, before: Dump | None
) -> Dump:
    """Begin to dump into the folder, or go on there after the turn `before`. `only` is one module, under a name of its own."""
    running = active_probe()
    if running is not None:
        raise SettingsError(f"a recording into '{running.out}' is running in this process. Stop it first.")
    if config.task == "overflow_check":
        numbers = None if before is None else before.numbers
        return start_overflow(config, folder, model=model, rank=rank, numbers=numbers)
    form = make_form(config, folder, continued=before is not None)
    settings: dict[str, Any] = {"level": _LEVELS[config.level], "stacks": config.extra_info}
    if only is not None:
        module, name = only
        model = {name: module}
        settings |= {"level": "module", "ops": [f"[M]odule.{glob.escape(name)}.{class_name(module)}"]}
    elif config.level == "L2":
        settings["inside"] = config.list
    directions = tuple(dict.fromkeys(part.split(".")[0] for part in config.parts))
    sides = tuple(dict.fromkeys(part.split(".")[1] for part in config.parts))
    ways = OlderWays(
        operators=True,
        listed=config.list if only is None and config.level != "L2" else (),
        excluded=config.excluded,
        numbers={} if before is None else before.numbers,
    )
    probe = Probe(
        folder / "dump.json",
        model=model,
        rank=rank,
        form=form,
        ways=ways,
        mode="structure" if config.task == "structure" else "summary" if not _needs_bytes(form) else "tensor",
        span=config.scope or None if only is None else None,
        directions=directions,
        sides=sides,
        **settings,
    )
    return probe.start()


def make_form(config: DumpConfig, folder: Path, *, continued: bool = False) -> MsprobeForm:
    """What whoever writes is told of the layout."""
    keeps_values = config.task == "tensor" or (config.task == "statistics" and config.tensor_list)
    return MsprobeForm(
        str(folder),
        task=config.task,
        level=config.level,
        values=config.file_format if keeps_values else None,  # type: ignore[arg-type]  # checked by read_config
        values_of=config.tensor_list if config.task == "statistics" else (),
        digests=config.summary_mode == "md5",
        parents=config.level != "L1",
        parts=config.parts,
        continued=continued,
        index="debug.json" if config.level == "debug" else "dump.json",
    )


def _needs_bytes(form: MsprobeForm) -> bool:
    """Statistics are taken on the device where the tensor is; digests and files need its values."""
    return form.values is not None or form.digests

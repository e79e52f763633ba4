"""`PrecisionDebugger`, `module_dump`, `module_dump_end`: the one debugger of a process, and when it dumps.

The older tool kept one in the process, and so do we: a second one is the first one, and its methods can be called on the
class. From `start` to `stop` calls are dumped into the folder of the step; `step` begins the next. Errors in the settings
are raised when it is made or started, before anything is computed; nothing of ours is raised after that.
"""

from __future__ import annotations

import atexit
import glob
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from tensorprobe.errors import SettingsError, TensorprobeError
from tensorprobe.legacy.layouts.dump_sink import DumpSink
from tensorprobe.legacy.layouts.targets import MsprobeTarget, remove_ended
from tensorprobe.legacy.msprobe import logger, speak
from tensorprobe.legacy.msprobe.config import DumpConfig, make_target, read_config
from tensorprobe.legacy.msprobe.free_benchmark import FreeBenchmark
from tensorprobe.legacy.msprobe.grad_probe import GradientProbe
from tensorprobe.legacy.msprobe.overflow import start_overflow
from tensorprobe.legacy.msprobe.saved_variables import SavedVariables
from tensorprobe.model import Coverage
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.sink import CallRules, Needs
from tensorprobe.taps import Probe, active_probe, seed_all
from tensorprobe.taps.module_names import class_name
from tensorprobe.taps.ranks import find_rank
from tensorprobe.taps.step_taps import LoaderTap

_DEFAULT_SEED = 1234


class PrecisionDebugger:
    """The settings come from `config_path`, a config.json; what is given beside it comes before what stands there."""

    _instance: PrecisionDebugger | None = None
    _lock = threading.RLock()

    def __new__(cls, *_: Any, **__: Any) -> PrecisionDebugger:
        """The one that there is."""
        return cls._instance if cls._instance is not None else super().__new__(cls)

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        model: Any = None,
        step: Sequence[int | str] | None = None,
    ) -> None:
        speak()
        config = read_config(config_path, task=task, dump_path=dump_path, level=level, step=step)
        if self is PrecisionDebugger._instance:
            if config != self.config:
                logger.warning("There is a PrecisionDebugger already, and its settings stay: %s.", self.config)
            return
        self.config: DumpConfig = config
        self._model = model
        self._turn = _Turn()
        self._saved: SavedVariables | None = None
        self._gradients: GradientProbe | None = None
        self._tap: LoaderTap | None = None
        self._said: set[str] = set()
        self._under_way = False
        """Whether a first `start` has gone well: nothing is raised any more then."""
        self._pid = os.getpid()
        if config.seed is not None or config.is_deterministic:
            seed_all(_DEFAULT_SEED if config.seed is None else config.seed, mode=config.is_deterministic)
        if config.enable_dataloader:
            self._tap = LoaderTap(self._before_batch, self._after_batch)
            self._tap.install()
        atexit.register(self._at_exit)
        PrecisionDebugger._instance = self

    @classmethod
    def start(
        cls, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        """Begin to dump the step, or go on with it, if the step and the rank are wanted. `model` gives modules their names."""
        self = cls._only()
        if token_range is not None or scheduled_tokens is not None:
            raise SettingsError("start: token_range and scheduled_tokens are not part of this version. Leave them out.")
        if self._is_by_loader("start"):
            return
        with self._lock:
            self._model = self._model if model is None else model
            self._begin(rank_id)

    @classmethod
    def stop(cls) -> None:
        """End the dump; everything is on disk then. `start` goes on in the same step."""
        self = cls._only()
        if not self._is_by_loader("stop"):
            with self._lock:
                self._end()

    @classmethod
    def step(cls) -> None:
        """The step is over."""
        self = cls._only()
        if not self._is_by_loader("step"):
            with self._lock:
                self._next_step()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Save a tensor, a number, or lists and dicts of them, and the gradients that reach them, in debug.json. Level debug."""
        self = cls._only()
        if self.config.level != "debug":
            self._say_once("save(%r) does nothing: level is '%s'. Set level to 'debug'.", name, self.config.level)
            return
        with self._lock:
            if self._saved is None:
                folder, rank = find_place(self.config, self._turn.step, None)
                if not self._is_wanted(rank):
                    return
                try:
                    self._saved = SavedVariables(self.config, folder)
                except (OSError, TensorprobeError) as error:
                    let_through(error)
                    self._say_once("save(%r) has saved nothing: %s", name, error)
                    return
            self._saved.save(variable, name, gradients=save_backward)

    @classmethod
    def monitor(cls, module: Any) -> None:
        """Write statistics and signs of this model's gradients at every optimizer step. Task grad_probe."""
        self = cls._only()
        if self.config.task != "grad_probe":
            self._say_once("monitor() does nothing: task is '%s'. Set task to 'grad_probe'.", self.config.task)
            return
        with self._lock:
            if self._gradients is not None:
                self._gradients.remove()
            self._gradients = GradientProbe(self.config, module)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """The number of the step that is trained now, for a training that goes on where another ended."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise SettingsError(f"set_init_step takes the number of a step, from 0; got {step!r}.")
        self = cls._only()
        with self._lock:
            self._end()
            self._close_saved()
            self._turn = _Turn(step)

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """The name that `stop` had at first."""
        cls.stop()

    @classmethod
    def _only(cls) -> PrecisionDebugger:
        if cls._instance is None:
            raise SettingsError("there is no PrecisionDebugger yet. Make one first: PrecisionDebugger('config.json')")
        return cls._instance

    def dump_only(self, only: tuple[Any, str] | None) -> None:
        """From here on one module under a name of its own, or everything again."""
        with self._lock:
            turn = self._turn
            turn.only = only
            if turn.dump is not None:
                self._end()
                self._begin(turn.rank)

    def _begin(self, rank: int | None) -> None:
        turn, config = self._turn, self.config
        if config.task == "grad_probe":
            self._say_once("start() does nothing: task is 'grad_probe'. Call monitor(model).")
        if turn.dump is not None or config.level == "debug" or config.task == "grad_probe":
            return
        folder, number = find_place(config, turn.step, rank)
        wanted = self._is_wanted(number)
        before = turn.before if turn.folder == folder else None
        try:
            if not self._under_way:
                config.dump_path.mkdir(parents=True, exist_ok=True)  # the first wanted step may be hours away
            if wanted:
                turn.dump = begin(config, folder, rank=number, model=self._model, only=turn.only, before=before)
        except (OSError, TensorprobeError) as error:
            let_through(error)
            if not self._under_way:
                raise _explained(error, config.dump_path) from None
            logger.error("Step %d is not dumped: %s", turn.step, error)  # training is under way: it goes on
            return
        self._under_way = True
        if not wanted:
            return
        turn.folder, turn.rank = folder, rank
        if before is None and config.task != "free_benchmark":
            logger.info("Step %d is dumped to '%s'.", turn.step, folder)

    def _end(self) -> None:
        turn = self._turn
        dump, turn.dump = turn.dump, None
        if dump is None:
            return
        turn.before = dump
        coverage = dump.stop()
        if coverage is None:
            return  # a forked child: the dump is its parent's
        logger.info("Dumped %s calls to '%s'.", f"{coverage.recorded:,}", turn.folder)
        for note in [*coverage.notes, *coverage.blind_spots]:
            logger.warning("Not in the dump: %s", note)
        for reason, count in coverage.slots_skipped.items():
            logger.warning("Not in the dump: values of %d tensors: %s", count, reason)

    def _next_step(self) -> None:
        self._end()
        self._close_saved()
        self._turn = _Turn(self._turn.step + 1, only=self._turn.only)

    def _close_saved(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.close()

    def _is_wanted(self, rank: int) -> bool:
        steps, ranks = self.config.step, self.config.rank
        return (not steps or self._turn.step in steps) and (not ranks or rank in ranks)

    def _is_by_loader(self, method: str) -> bool:
        if self._tap is not None:
            self._say_once(
                "%s() does nothing: enable_dataloader is on, so the batches of the DataLoader tell steps.", method
            )
        return self._tap is not None

    def _before_batch(self, number: int) -> None:
        """The loader is asked for a batch: the step before is over, whether there is another one or not."""
        if os.getpid() != self._pid or not number:
            return
        with self._lock:
            self._next_step()
        last = max(self.config.step, default=None)
        if last is not None and self._turn.step > last:
            self._unwatch()
            # Exactly this text and type: the older tool's documents show it, and scripts look for it.
            raise Exception(f"msprobe: exit after iteration {last}")

    def _after_batch(self, number: int) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._begin(None)

    def _unwatch(self) -> None:
        if self._tap is not None:
            self._tap.remove()

    def _say_once(self, message: str, *parts: object) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, *parts)

    def _at_exit(self) -> None:
        self._unwatch()
        if self._gradients is not None:
            self._gradients.remove()
        self._end()
        self._close_saved()


def _explained(error: Exception, path: Path) -> Exception:
    """What the disk says of a folder, as an error in the settings."""
    if not isinstance(error, OSError):
        return error
    return SettingsError(f"dump_path '{path}' cannot hold a dump: {error.strerror or error}. Choose another folder.")


@dataclass
class _Turn:
    """One step: the dump that is under way in it, the one before in the same step, and where they go."""

    step: int = 0
    only: tuple[Any, str] | None = None
    dump: Dump | None = None
    before: Dump | None = None
    folder: Path | None = None
    rank: int | None = None


def module_dump(module: torch.nn.Module, dump_name: str) -> None:
    """From here to `module_dump_end` dump this module alone, as `Module.{dump_name}.{class}`, and no API calls."""
    if not isinstance(module, torch.nn.Module):
        raise SettingsError(f"module_dump takes a torch.nn.Module; got {type(module).__name__}.")
    if not isinstance(dump_name, str) or not dump_name:
        raise SettingsError(f"module_dump takes a name for the module as its second argument; got {dump_name!r}.")
    PrecisionDebugger._only().dump_only((module, dump_name))


def module_dump_end() -> None:
    """Dump everything again that the settings ask for."""
    PrecisionDebugger._only().dump_only(None)


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
    if config.task == "free_benchmark":
        step = int(folder.parent.name.removeprefix("step"))
        dumped = replace(config, task="tensor")
        held: dict[str, int] = {} if before is None else before.numbers
        return FreeBenchmark(config, step, rank, model, lambda to: _begin_dump(dumped, to, rank, model, None, held))
    if before is None and folder.name.startswith("proc"):
        remove_ended(folder)
    return _begin_dump(config, folder, rank, model, only, None if before is None else before.numbers)


def _begin_dump(
    config: DumpConfig,
    folder: Path,
    rank: int,
    model: Any,
    only: tuple[Any, str] | None,
    numbers: dict[str, int] | None,
) -> Dump:
    target = make_target(config, folder, continued=numbers is not None and folder.exists())
    settings: dict[str, Any] = {"level": _LEVELS[config.level], "stacks": config.extra_info}
    if only is not None:
        module, name = only
        model = {name: module}
        settings |= {"level": "module", "ops": [f"[M]odule.{glob.escape(name)}.{class_name(module)}"]}
    elif config.level == "L2":
        settings["inside"] = config.list
    directions = tuple(dict.fromkeys(part.split(".")[0] for part in config.parts))
    sides = tuple(dict.fromkeys(part.split(".")[1] for part in config.parts))
    rules = CallRules(
        operators=True,
        only_given=True,
        inner=False,
        regions=True,
        torch_paths=True,
        listed=config.list if only is None and config.level != "L2" else (),
        only=config.wrapped,
        excluded=config.excluded,
        numbers=numbers or {},
    )
    probe = Probe(
        folder / "dump.json",
        model=model,
        rank=rank,
        sink=DumpSink(folder / "dump.json", target, needs=Needs(rules=rules)),
        mode="structure" if config.task == "structure" else "summary" if not _needs_bytes(target) else "tensor",
        span=config.scope or None if only is None else None,
        directions=directions,
        sides=sides,
        **settings,
    )
    return probe.start()


def _needs_bytes(target: MsprobeTarget) -> bool:
    """Statistics are taken on the device where the tensor is; digests and files need its values."""
    return target.values is not None or target.digests

"""`PrecisionDebugger` of later ptdbg_ascend: the functions of `dump`, called by steps. One for each process.

Each step is dumped into `{dump_path}/ptdbg_dump_v1.0/step{number}/rank{rank}/dump.pkl`. Errors in the settings are raised
when it is made or configured, before anything is computed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.ptdbg import dump, logger, speak
from tensorprobe.taps.ranks import find_rank_of

_HOOKS = ("dump", "overflow_check")


class PrecisionDebugger:
    """Dumps the steps that are asked for, or looks for overflows in them, from `start` to `stop`."""

    _instance: PrecisionDebugger | None = None

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        hook_name: str | None = None,
        rank: int | None = None,
        step: Sequence[int] | None = None,
        enable_dataloader: bool = False,
        model: torch.nn.Module | None = None,
    ) -> None:
        speak()
        if hook_name not in _HOOKS:
            raise SettingsError(f"hook_name is {hook_name!r}; it must be one of {', '.join(_HOOKS)}.")
        if enable_dataloader is not False:
            raise SettingsError(
                "enable_dataloader is not part of this version. Call start(), stop() and step() where a step begins and ends."
            )
        steps = [] if step is None else list(step)
        if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in steps):
            raise SettingsError(f"step is {step!r}; it must be a list of whole numbers from 0 on.")
        self._home = Path("" if dump_path is None else dump_path).absolute()
        self._home.mkdir(parents=True, exist_ok=True)
        self._model = torch.nn.Module() if model is None else model
        self._hook, self._rank, self._steps = hook_name, rank, steps
        self._step = self._parts = 0
        self._is_on = self._is_registered = False
        self._switch: dict[str, Any] = {"mode": "api_stack", "filter_switch": "OFF"}
        self._options: dict[str, Any] = {}
        PrecisionDebugger._instance = self

    def configure_hook(
        self,
        mode: str = "api_stack",
        scope: Sequence[str] = (),
        api_list: Sequence[str] = (),
        filter_switch: str = "OFF",
        acl_config: str | os.PathLike[str] | None = None,
        backward_input: Sequence[str | os.PathLike[str]] = (),
        input_output_mode: str | Sequence[str] = "all",
        overflow_nums: int = 1,
    ) -> None:
        """Say what is dumped, as `set_dump_switch` has it, and with which overflow the training ends."""
        switch = {"mode": mode, "scope": scope, "api_list": api_list, "filter_switch": filter_switch}
        if self._hook == "dump":
            dump.read_order(**switch, dump_mode=input_output_mode)
        self._switch = {**switch, "dump_mode": input_output_mode}
        self._options = {} if self._hook == "dump" else {"overflow_nums": overflow_nums}
        if acl_config is not None:
            self._options |= {"dump_mode": "acl", "dump_config": acl_config}
        if backward_input:
            dump.set_backward_input(backward_input)

    @classmethod
    def start(cls) -> None:
        """Begin to dump the step, or to look for overflows in it, if the step and the rank are wanted."""
        self = cls._only()
        rank = find_rank_of(self._model)
        if self._is_on or (self._steps and self._step not in self._steps) or self._rank not in (None, rank):
            return
        self._is_on = True
        if self._hook == "overflow_check":
            if not self._is_registered:
                self._register(dump.overflow_check, "dump.pkl", "")
            dump.set_overflow_check_switch("ON", self._switch["filter_switch"])
            return
        name = f"dump_{self._parts}.pkl" if self._parts else "dump.pkl"
        if self._parts:
            logger.warning("start() again in step %d: this part goes to '%s', with numbers from 0.", self._step, name)
        self._parts += 1
        self._register(dump.acc_cmp_dump, name, f"step{self._step}")
        dump.set_dump_switch("ON", **self._switch)

    @classmethod
    def stop(cls) -> None:
        """End what `start` began."""
        self = cls._only()
        if self._is_on:
            self._is_on = False
            end = dump.set_dump_switch if self._hook == "dump" else dump.set_overflow_check_switch
            end("OFF")

    @classmethod
    def step(cls) -> None:
        """The step is over."""
        self = cls._only()
        cls.stop()
        self._step, self._parts = self._step + 1, 0

    def _register(self, hook: Any, name: str, step: str) -> None:
        dump.register_step(step, self._home / name, self._model, hook, **self._options)
        self._is_registered = True

    @classmethod
    def _only(cls) -> PrecisionDebugger:
        if cls._instance is None:
            raise SettingsError(
                "there is no PrecisionDebugger yet. Make one first: PrecisionDebugger('./dump_path', 'dump')"
            )
        return cls._instance

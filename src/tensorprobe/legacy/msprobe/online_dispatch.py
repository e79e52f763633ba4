"""`with PtdbgDispatch(dump_mode="auto", dump_path="…"):` every ATen call in it is done on the CPU too, and the two are compared.

In: the older tool's arguments, checked before anything is computed. Out: a folder in `dump_path` with the table of all
calls and the inputs and outputs of those that are dumped; a line "Failed …" for each output that is not accurate. Nothing
of ours is raised inside the `with`, and nothing is left installed after it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.errors import SettingsError, did_you_mean, nearest
from tensorprobe.legacy.compared.arguments import demand_bool, demand_path
from tensorprobe.legacy.msprobe import logger, speak
from tensorprobe.legacy.msprobe.online_checking import DeviceChecker, DispatchFindings
from tensorprobe.legacy.msprobe.online_results import ResultFolder
from tensorprobe.report.online_text import render_online
from tensorprobe.taps import Probe, active_probe
from tensorprobe.taps.ranks import find_rank
from tensorprobe.text import counted
from tensorprobe.watches.online.workers import Workers

DUMP_MODES = ("all", "list", "auto", "OFF")
_BUDGET_BYTES = 1 << 30


class PtdbgDispatch:
    """An online compare by its old name. Each `with` has a folder of its own."""

    def __init__(
        self,
        dump_mode: str = "OFF",
        api_list: Sequence[str] | None = None,
        debug: bool = False,
        dump_path: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        process_num: int = 0,
    ) -> None:
        speak()
        if dump_mode not in DUMP_MODES:
            raise SettingsError(
                f"dump_mode is {dump_mode!r}; it must be one of {', '.join(DUMP_MODES)}."
                f"{did_you_mean(str(dump_mode), DUMP_MODES)}"
            )
        if dump_path is None:
            raise SettingsError("dump_path is not given: the results go there. For example dump_path='./dump'.")
        demand_bool("debug", debug)
        self._path = demand_path("dump_path", dump_path)
        self._mode, self._ops = dump_mode, _read_ops(dump_mode, api_list)
        self._tag, self._debug, self._workers = _read_tag(tag), debug, _read_number(process_num)
        self._probe: Probe | None = None

    def __enter__(self) -> PtdbgDispatch:
        running = active_probe()
        if running is not None:
            raise SettingsError(
                f"a recording or compare into '{running.out}' is running in this process. Stop it first."
            )
        rank = find_rank()
        folder = self._folder = ResultFolder(self._path, self._tag, rank, self._mode, self._ops)
        workers = Workers(self._workers, _BUDGET_BYTES)
        findings = self._findings = DispatchFindings(folder, workers, rank=rank, debug=self._debug)
        findings.ask(DeviceChecker(workers, findings.found))
        probe = Probe(folder.path, rank=rank, steps_by="optimizer", sink=findings, level="aten")
        try:
            probe.start()
        except BaseException:
            workers.close()
            raise
        self._probe = probe
        return self

    def __exit__(self, *_: object) -> None:
        probe, self._probe = self._probe, None
        if probe is None or probe.stop() is None:  # in a forked child there is nothing to tell
            return
        logger.info("%s\nEvery compared output: '%s'", render_online(self._findings.result), self._folder.csv)
        if self._folder.lost:
            lost = counted(self._folder.lost, "call")
            logger.warning("Not dumped, or not whole: %s. First: %s", lost, self._folder.first_loss)


def _read_ops(dump_mode: str, api_list: Any) -> frozenset[str]:
    """The ops whose calls are dumped in mode list: `add`, or one overload, `add.Tensor`."""
    if dump_mode != "list":
        if api_list:
            logger.warning("api_list has no meaning in dump_mode %r. Use dump_mode 'list'.", dump_mode)
        return frozenset()
    if isinstance(api_list, str) or not isinstance(api_list, Sequence) or not api_list:
        raise SettingsError(
            f"dump_mode 'list' needs api_list, a list of names of ATen ops, such as ['mm', 'add']; got {api_list!r}."
        )
    for name in api_list:
        if not isinstance(name, str) or not _is_op(name):
            known = {
                full.removeprefix("aten::").partition(".")[0]
                for full in torch_names.all_op_names()
                if full[:6] == "aten::"
            }
            close = ", ".join(nearest(str(name).partition(".")[0], sorted(known)))
            raise SettingsError(
                f"api_list: {name!r} is no ATen op.{f' Nearest: {close}.' if close else ''}\n"
                "  dir(torch.ops.aten) lists them."
            )
    return frozenset(api_list)


def _is_op(name: str) -> bool:
    base, _, overload = name.partition(".")
    if not base.isidentifier() or base.startswith("__"):
        return False
    packet = getattr(torch.ops.aten, base, None)
    return isinstance(packet, torch_names.OpOverloadPacket) and (not overload or overload in packet.overloads())


def _read_tag(tag: Any) -> str | None:
    if tag is None or (isinstance(tag, str) and tag and tag.isprintable() and not {*tag} & {*"/\\"}):
        return tag
    raise SettingsError(f"tag is {tag!r}; it becomes part of a folder's name: a text without slashes.")


def _read_number(process_num: Any) -> int:
    cores = os.cpu_count() or 1
    most = cores // 4
    if isinstance(process_num, bool) or not isinstance(process_num, int) or not 0 <= process_num <= most:
        raise SettingsError(
            f"process_num is {process_num!r}; it must be a whole number from 0 to {most}, a quarter of the {cores} "
            "cores of this machine. 0 compares in the thread of the training."
        )
    return process_num

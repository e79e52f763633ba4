"""`with PtdbgDispatch(dump_mode="auto", dump_path="…"):` every ATen call in it is done on the CPU too, and the two are compared.

In: the older tool's arguments, checked before anything is computed. Out: a folder in `dump_path` with the table of all
calls and the inputs and outputs of those that are dumped; a line "Failed …" for each output that is not accurate. Nothing
of ours is raised inside the `with`, and nothing is left installed after it.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from tensorprobe import torch_names
from tensorprobe.errors import SettingsError, did_you_mean, nearest
from tensorprobe.legacy.compared.comparing import demand_bool, demand_path, timestamp
from tensorprobe.legacy.compared.tables import NOTHING
from tensorprobe.legacy.layouts.dump_files import older_statistics
from tensorprobe.legacy.msprobe import logger, speak
from tensorprobe.model import DTYPES
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.model.event import Event
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.online import OnlineRow
from tensorprobe.numerics.summary import summarize_address
from tensorprobe.report.online_text import failure_line, render_online
from tensorprobe.taps import Probe, active_probe
from tensorprobe.taps.ranks import find_rank
from tensorprobe.text import counted, plain
from tensorprobe.watches.online.chain import Compared
from tensorprobe.watches.online.checker import Checker, Found
from tensorprobe.watches.online.findings import Findings
from tensorprobe.watches.online.lifting import Arguments, lower
from tensorprobe.watches.online.policies import Measures, Sampler
from tensorprobe.watches.online.verdict import Case, Judged
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
    most = max(1, cores // 4)
    if isinstance(process_num, bool) or not isinstance(process_num, int) or not 0 <= process_num <= most:
        raise SettingsError(
            f"process_num is {process_num!r}; it must be a whole number from 0 to {most}, a quarter of the {cores} "
            "cores of this machine and at least 1. 0 compares in the thread of the training."
        )
    return process_num


REFERENCE, POLICY = "cpu", "seed-2024"


class DeviceChecker(Checker):
    """Compares with the CPU. Calls are named `mm_0`, `mm_1`, …: numbers go on through forward, backward and all steps."""

    def __init__(self, workers: Workers, found: Found) -> None:
        super().__init__(
            precision="own",
            measures=Measures(POLICY),
            sampler=Sampler(),
            workers=workers,
            libraries=frozenset(),
            found=found,
        )
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._naming = threading.Lock()

    def end(self, opened: Any, result: Any) -> Any:
        """As ever, but the call has the older tool's name. Not in `begin`, where a frame of ours would be in the user's stack."""
        base = opened.plan.base
        with self._naming:
            name = f"{base}_{next(self._numbers[base])}"
        return super().end(opened._replace(event=msgspec.structs.replace(opened.event, name=name)), result)

    def precision_of(self, given: Arguments) -> str:
        """The call's own where a device is involved."""
        device = given.kwargs.get("device")
        on_cpu = device is None or torch.device(device).type == "cpu"
        return "rounded" if on_cpu and all(tensor.is_cpu for _, tensor in given.tensors()) else "own"


class DispatchFindings(Findings):
    """Writes down every compared call, and says "Failed" of those that are not accurate."""

    def __init__(self, folder: ResultFolder, workers: Workers, *, rank: int, debug: bool) -> None:
        super().__init__(
            reference=REFERENCE,
            policy=POLICY,
            rank=rank,
            folder=None,
            workers=workers,
            chain=None,
            saves=False,
            stop_after=None,
            most_saved=0,
        )
        self._results, self._debug = folder, debug

    def found(
        self, case: Case, event: Event, step: int, order: int, rows: list[Judged], chained: Compared | None
    ) -> None:
        """Dump the call if it is to be, tell of it, and note its outputs: a line is there only when its files are."""
        trouble = self._results.dump(case, event.name, rows)
        super().found(case, event, step, order, rows, chained)
        stack = [] if event.stack is None else self._stacks.get((step, event.stack), [])
        lines = self._results.note(case, event.name, rows, " <- ".join(stack), trouble)
        for line in lines if self._debug else ():
            logger.info("%s", line)

    def say(self, row: OnlineRow, number: int) -> None:
        """One line for each output that fails, however many there are."""
        logger.warning("%s", failure_line(row))


COLUMNS = (
    *("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"),
    *("NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean"),
    *("Cosine", "MaxAbsErr", "MaxRelativeErr", "Accuracy Reached or Not", "NPU_Stack_Info", "Err_message"),
)
_TOLD = ("NPU Name", "Cosine", "MaxAbsErr", "Accuracy Reached or Not", "Err_message")


class ResultFolder:
    """Made new. SettingsError when `dump_path` cannot hold it."""

    def __init__(self, dump_path: Path, tag: str | None, rank: int, mode: str, ops: frozenset[str]) -> None:
        self._mode, self._ops = mode, ops
        self._lock = threading.Lock()
        self.lost = 0
        """Calls that should have been dumped and are not, or not whole."""
        self.first_loss = ""
        try:
            self.path, stamp = _make_folder(dump_path.absolute(), f"msprobe_{f'{tag}_' if tag else ''}rank{rank}")
            for side in ("cpu", "npu") if mode != "OFF" else ():
                (self.path / side).mkdir()
            self.csv = self.path / f"compare_result_rank{rank}_{stamp}.csv"
            self._append([COLUMNS])
        except OSError as error:
            raise SettingsError(
                f"dump_path '{plain(dump_path)}' cannot hold the results: {error.strerror or error}. Choose another folder."
            ) from None

    def dump(self, case: Case, name: str, rows: list[Judged]) -> str:
        """Write inputs and outputs of a call, if the mode has it so. What kept them from disk comes back, and is counted."""
        if not self._wants(case, rows):
            return ""
        received = tuple(f"input.kwargs.{at}" for at in case.plan.received)  # only written to: there is nothing in them
        inputs = lower(case.templates, case.lifted).tensors()
        files = [("npu", slot, tensor) for slot, tensor in inputs if not slot.startswith(received)]
        files += [("npu", row.slot, row.result) for row in rows if row.slot in case.results]
        files += [("cpu", row.slot, row.wide) for row in rows if row.wide is not None]
        try:
            for side, slot, tensor in files:
                numpy.save(self.path / side / f"{name}_{slot}.npy", _array(tensor), allow_pickle=False)
        except (OSError, RuntimeError, TypeError) as error:
            let_through(error)
            trouble = f"not dumped: {type(error).__name__}: {error}"
            with self._lock:
                self.lost += 1
                self.first_loss = self.first_loss or f"{name} {trouble}"
            return trouble
        return ""

    def note(self, case: Case, name: str, rows: list[Judged], stack: str, trouble: str) -> list[str]:
        """Add the outputs of a call to the table. What it says of each comes back, on one line."""
        lines = [_line(case, name, row, stack, trouble) for row in rows]
        self._append(list(map(dict.values, lines)))
        return [", ".join(f"{title} {line[title]}" for title in _TOLD if line[title] != "") for line in lines]

    def _wants(self, case: Case, rows: list[Judged]) -> bool:
        if self._mode == "auto":
            return any(not row.opinion.passes for row in rows)
        if self._mode == "list":
            return not self._ops.isdisjoint((case.plan.base, case.plan.name.removeprefix("Aten.")))
        return self._mode == "all"

    def _append(self, lines: Sequence[Iterable[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        with self._lock, self.csv.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


def _make_folder(parent: Path, name: str) -> tuple[Path, str]:
    """A new folder, and the time in its name. A second one within one second has `_1` behind it."""
    parent.mkdir(parents=True, exist_ok=True)
    now = stamp = timestamp()
    for number in count(1):
        folder = parent / f"{name}_{stamp}"
        try:
            folder.mkdir()
            break
        except FileExistsError:
            stamp = f"{now}_{number}"
    return folder, stamp


def _line(case: Case, name: str, row: Judged, stack: str, trouble: str) -> dict[str, Any]:
    """A line of the table."""
    result, wide = row.result if row.slot in case.results else None, row.wide
    sides = (_described(result), _described(wide))
    figures: list[Any] = [NOTHING] * 3
    if wide is not None and row.figures["count"]:
        figures = [1 - row.figures["one_minus_cosine"], row.figures["max_abs"], row.figures["max_rel"]]
    cells = [
        *[f"{name}_{row.slot}"] * 2,
        *(side[0] for side in sides),
        *(side[1] for side in sides),
        *(statistic for side in sides for statistic in side[2:]),
        *figures,
        "Yes" if row.opinion.passes else "No",
        stack,
        "; ".join(filter(None, (row.message, _strange(row), trouble))),
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def _described(tensor: torch.Tensor | None) -> list[Any]:
    """dtype, shape, max, min and mean of a tensor on the host."""
    if tensor is None:
        return [NOTHING] * 5
    name = str(tensor.dtype).removeprefix("torch.")
    shape = list(tensor.shape)
    if not tensor.numel():
        return [f"torch.{name}", shape, *[NOTHING] * 3]
    return [
        f"torch.{name}",
        shape,
        *older_statistics(summarize_address(tensor.data_ptr(), tensor.numel(), DTYPES[name])),
    ]


def _strange(row: Judged) -> str:
    """What has to be said of values that have no difference."""
    if row.wide is None:
        return ""
    if not row.wide.numel():
        return "the tensor has no elements"
    lost = row.wide.numel() * (2 if row.wide.is_complex() else 1) - int(row.figures["count"])
    if not lost:
        return ""
    unlike = int(row.figures["nonfinite_different"])
    said = f"{unlike:,} of them not the same on both sides" if unlike else "the same on both sides"
    return f"NaN or infinite: {counted(lost, 'value')}, {said}; figures are of the others"


def _array(tensor: torch.Tensor) -> Any:
    """The values as numpy can hold them: bfloat16 and float8 become float32, complex32 complex64."""
    if str(tensor.dtype).removeprefix("torch.") not in NUMPY_NAMES:
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()

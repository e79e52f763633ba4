"""The folder of one online compare: `msprobe_[tag_]rank0_20240101120000` with a table of all calls, `cpu/` and `npu/`.

`npu/` is for the device under test, whatever it is: inputs and outputs of the calls that are dumped, as
`mm_0_input.0.npy`. `cpu/` has the outputs of the reference only, since its inputs are the device's. A line of the table is
on disk as soon as its call was compared, and after its files.
"""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import torch

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.compared.paired import NOTHING
from tensorprobe.legacy.compared.result_file import timestamp
from tensorprobe.legacy.layouts.dump_files import older_statistics
from tensorprobe.model import DTYPES
from tensorprobe.model.dtypes import NUMPY_NAMES
from tensorprobe.numerics.summary import summarize_address
from tensorprobe.text import counted, plain
from tensorprobe.watches.online.lifting import lower
from tensorprobe.watches.online.verdict import Case, Judged

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

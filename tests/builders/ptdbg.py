"""Dumps of ptdbg_ascend written by hand, with json and numpy alone and nothing of ours: so that reader and layout are compared.

write_dump(tmp_path / "npu_v1.0", {0: [tensor("Torch_relu_0_forward_input.0", x), tensor("Torch_relu_0_forward_output", y)]})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WIDENED = {"bfloat16": np.float32, "float8_e4m3fn": np.float32, "float8_e5m2": np.float32, "complex32": np.complex64}
"""What numpy does not have, and what stands in the file instead."""


class Line(NamedTuple):
    """One line of a pkl, and the array of the file that belongs to it."""

    fields: list[Any] | bytes
    array: Any = None

    @property
    def raw(self) -> bytes:
        return self.fields if isinstance(self.fields, bytes) else json.dumps(self.fields).encode()


def tensor(name: str, array: Any, *, dtype: str | None = None, step: int = 1, statistics: Any = None) -> Line:
    """The line of a tensor. `dtype` is the true one, when numpy does not have it."""
    held = np.asarray(array)
    if dtype is not None:
        held = held.astype(WIDENED.get(dtype, dtype))
    if statistics is None:
        statistics = moments(held)
    return Line([name, step, [], f"torch.{dtype or held.dtype}", list(held.shape), statistics], held)


def bare(name: str, array: Any) -> Line:
    """A line without statistics, as the overflow check writes them."""
    held = np.asarray(array)
    return Line([name, 101, [], f"torch.{held.dtype}", list(held.shape)], held)


def number(name: str, value: float) -> Line:
    """The line of a number among the arguments."""
    return Line([name, 1, [], str(type(value)), "[]", [value] * 3], np.asarray(value))


def stack(call: str, *frames: Sequence[str]) -> Line:
    """The line with the stack of a call; `frames` are file, line, function, code."""
    return Line([f"{call}_stack_info", [list(frame) for frame in frames]])


def moments(array: Any) -> list[float]:
    """Greatest, least and mean, as torch gives them: NaN when one element is."""
    if array.dtype.kind == "b" or not array.size:
        return [[], [], []]  # type: ignore[list-item]  # so does the older tool
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        return [float(wide.max()), float(wide.min()), float(wide.mean())]


def write_rank(folder: Path, lines: Sequence[Line], *, name: str = "npu_dump", data: str | None = None) -> Path:
    """`name.pkl` in the folder, and its values in the folder `data` beside it; the path of the pkl comes back."""
    values = folder / (data or name)
    values.mkdir(parents=True, exist_ok=True)
    pkl = folder / f"{name}.pkl"
    pkl.write_bytes(b"".join(line.raw + b"\n" for line in lines))
    for line in lines:
        if line.array is not None:
            np.save(values / f"{line.fields[0]}.npy", line.array)
    return pkl


def write_dump(folder: Path, ranks: Mapping[int, Sequence[Line]] | Sequence[Line], **how: Any) -> Path:
    """A dump with a folder for each rank; the folder comes back."""
    for rank, lines in (ranks if isinstance(ranks, Mapping) else {0: ranks}).items():
        write_rank(folder / f"rank{rank}", lines, **how)
    return folder

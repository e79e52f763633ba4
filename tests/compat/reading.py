"""Tables, and a dump of ptdbg_ascend, read with csv, json and numpy alone: none of our code, so that it can contradict it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Line(NamedTuple):
    name: str
    step: int
    dtype: str
    shape: Any
    statistics: list[Any]
    array: np.ndarray[Any, Any]


class Dump(NamedTuple):
    lines: dict[str, Line]
    stacks: dict[str, list[list[str]]]
    files: set[str]


def read_dump(pkl: Path) -> Dump:
    """Every line with its array. Asserts what holds for any dump: names are unique, each line has its file, each file its line."""
    folder = pkl.with_suffix("")
    lines: dict[str, Line] = {}
    stacks: dict[str, list[list[str]]] = {}
    for text in pkl.read_text(encoding="utf-8").splitlines():
        entry = json.loads(text)
        assert isinstance(entry, list)
        name = entry[0]
        assert name not in lines and name not in stacks
        if name.endswith("_stack_info"):
            stacks[name.removesuffix("_stack_info")] = entry[1]
            assert all(len(frame) == 4 and all(isinstance(part, str) for part in frame) for frame in entry[1])
            continue
        _, step, empty, dtype, shape, statistics = entry
        assert empty == [] and len(statistics) == 3
        array = np.load(folder / f"{name}.npy", allow_pickle=False)
        assert list(array.shape) == ([] if shape == "[]" else shape)
        lines[name] = Line(name, step, dtype, shape, statistics, array)
    files = {file.stem for file in folder.iterdir()} if folder.is_dir() else set()
    assert files == set(lines)
    return Dump(lines, stacks, files)

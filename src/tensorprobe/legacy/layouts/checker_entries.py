"""One entry of a dump of api_accuracy_checker as slots and argument trees.

In: what JSON says of one call. Out: slots and trees as our own capture makes them, or ValueError with the place in the
entry and the fact. The entry is not trusted: numbers, sizes and depth are checked before they are used.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.npy import LONGEST, describe_npy
from tensorprobe.legacy.layouts.pt_format import describe_saved
from tensorprobe.legacy.layouts.value_files import FolderFiles
from tensorprobe.model import DTYPES, ArgumentTree, Slot, Summary
from tensorprobe.ops import Trait, has
from tensorprobe.record.elements import MAX_DIMENSIONS
from tensorprobe.record.lines import MAX_NESTING

"""Ops for which a tuple and a list mean different things. The layout writes a tuple as a list; a true list says so."""

_UNKNOWN = math.nan
"""One object for all: equal statistics must be equal, and a NaN is equal to itself only."""
_EMPTY = Summary(_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, 0, 0)
_LARGEST = 2**63
_LONGEST = 200
_NAMED = ("torch.dtype", "torch.layout", "torch.memory_format")


class DataFile(NamedTuple):
    """A file with values: the number by which it is known, and what it holds."""

    number: int
    dtype: str
    shape: tuple[int, ...]


FindFile = Callable[[str], DataFile]
"""From what stands under `datapath`; TensorDamaged when there is no sound file."""


class EntryReader:
    """The slots and arguments of one call in the making."""

    def __init__(self, find_file: FindFile) -> None:
        self.slots: list[Slot] = []
        self._find_file = find_file

    def forward(self, entry: Any, op: str) -> tuple[list[ArgumentTree], dict[str, ArgumentTree] | None]:
        """The arguments of a forward call: `{"args": [...], "kwargs": {...}}`, and its results where they are described."""
        if not isinstance(entry, dict):
            raise ValueError(f"an object with args and kwargs is needed, {_kind(entry)} is there")
        args, kwargs = entry.get("args") or [], entry.get("kwargs") or {}
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ValueError(f"args must be a list and kwargs an object; there are {_kind(args)} and {_kind(kwargs)}")
        trees = [self._walk(held, f"input.{at}", 0) for at, held in enumerate(args)]
        if has(op, Trait.INDEXES) and len(args) > 1 and isinstance(args[1], list):
            trees[1] = {"type": "tuple", "value": trees[1]}
        named = {key: self._walk(held, f"input.kwargs.{key}", 0) for key, held in kwargs.items()} or None
        self._walk(entry.get("output"), "output", 0)
        return trees, named

    def backward(self, entry: Any) -> None:
        """The gradients of the outputs, in their order; null where an output has none."""
        for at, held in enumerate(entry if isinstance(entry, list) else [entry]):
            self._walk(held, f"input.{at}", 0)

    def _walk(self, value: Any, path: str, depth: int) -> ArgumentTree:
        if depth > MAX_NESTING:
            raise ValueError("nested too deeply")
        if isinstance(value, list):
            return [self._walk(held, f"{path}.{at}", depth + 1) for at, held in enumerate(value)]
        if not isinstance(value, dict):
            return _number(value)
        kind = value.get("type")
        if not isinstance(kind, str):
            held = {key: self._walk(part, f"{path}.{key}", depth + 1) for key, part in value.items()}
            return {"type": "dict", "value": held}
        if "datapath" in value or ("dtype" in value and "shape" in value):
            self.slots.append(self._slot(value, path))
            return {"slot": path}
        kind = kind.removeprefix("<class '").removesuffix("'>")
        if kind in ("list", "tuple", "torch.Size", "slice"):
            return self._sequence(kind, value.get("value"), path, depth)
        return _argument(kind, value.get("value"))

    def _sequence(self, kind: str, value: Any, path: str, depth: int) -> ArgumentTree:
        if not isinstance(value, list):
            raise ValueError(f"{path}: a {kind} has {_kind(value)} for its value")
        if kind == "slice" and len(value) > 3:
            raise ValueError(f"{path}: a slice has three numbers at most, there are {len(value)}")
        parts = self._walk(value, path, depth)
        return parts if kind == "list" else {"type": kind, "value": parts}

    def _slot(self, value: dict[str, Any], path: str) -> Slot:
        grad = value.get("requires_grad") is True
        try:
            if "datapath" in value:
                return self._stored_slot(_text(value, "datapath"), path, grad)
            dtype, shape = _text(value, "dtype").removeprefix("torch."), _shape(value["shape"])
            skipped = value.get("skipped")
            return Slot(
                name=path,
                dtype=dtype,
                shape=shape,
                device="",
                grad=grad,
                summary=_summary(value, shape),
                skipped=skipped[:_LONGEST] if isinstance(skipped, str) else None,
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _stored_slot(self, datapath: str, path: str, grad: bool) -> Slot:
        """Only the file knows what it holds. Without it the other arguments can still be shown."""
        try:
            file = self._find_file(datapath)
        except TensorDamaged as fact:
            return Slot(name=path, dtype="", shape=(), device="", grad=grad, skipped=str(fact))
        nbytes = math.prod(file.shape) * DTYPES[file.dtype].itemsize
        return Slot(path, file.dtype, file.shape, device="", grad=grad, offset=file.number, nbytes=nbytes)


def _argument(kind: str, value: Any) -> ArgumentTree:
    """An argument that is no tensor, as our own capture writes it."""
    if kind == "NoneType":
        return None
    if kind == "ellipsis":
        return {"type": kind, "value": None}
    if kind in _NAMED:
        return {"type": kind, "value": str(value)[:_LONGEST].removeprefix("torch.")}
    if kind == "torch.device":
        return {"type": kind, "value": str(value)[:_LONGEST]}
    if kind == "complex":
        parts = value if isinstance(value, list) and len(value) == 2 else ()
        if not parts or not all(isinstance(part, (int, float, str)) for part in parts):
            raise ValueError(f"a complex number has {_kind(value)} for its value, not two numbers")
        return {"type": kind, "value": parts}
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind in ("int", "float") and isinstance(value, (int, float, str)):
        return _read_number(kind, value)
    if isinstance(value, (int, float)) and "numpy" in kind:
        return _number(value)  # numbers of numpy go into torch as plain ones
    return {"type": "object", "value": (str(value) if kind == "object" else kind)[:_LONGEST]}


def _read_number(kind: str, value: int | float | str) -> ArgumentTree:
    if not isinstance(value, str):
        return _number(float(value) if kind == "float" else value)
    try:
        parsed = {"int": int, "float": float}[kind](value[:5000])
    except ValueError:
        raise ValueError(f"{value[:40]!r} is given as {kind}") from None
    return _number(parsed)


def _number(value: Any) -> ArgumentTree:
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return {"type": "int", "value": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"type": "float", "value": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def _summary(value: dict[str, Any], shape: tuple[int, ...]) -> Summary | None:
    """What is known is the greatest and the least element. Mean and norm are NaN; the counts of NaN and inf 0, or -1 for some."""
    if 0 in shape:
        return _EMPTY
    ends = [_end(value, key) for key in ("Max", "Min")]
    if ends == [None, None]:
        return None
    greatest, least = (_UNKNOWN if end is None or math.isnan(end) else end for end in ends)
    return Summary(
        max=greatest,
        min=least,
        mean=_UNKNOWN,
        norm=_UNKNOWN,
        nan=-1 if any(end is not None and math.isnan(end) for end in ends) else 0,
        inf=-1 if any(end is not None and math.isinf(end) for end in ends) else 0,
    )


def _end(value: dict[str, Any], key: str) -> float | None:
    found = value.get(key)
    if found is None or found == []:  # so the older tool writes it for a tensor without elements
        return None
    try:
        return float(found)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its {key} is {_kind(found)}, not a number") from None


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int for size in value):
        raise ValueError(f"its shape is {_kind(value)}, not a list of whole numbers")
    if len(value) > MAX_DIMENSIONS or not all(0 <= size < _LARGEST for size in value):
        raise ValueError("its shape is impossible")
    if math.prod(value) >= _LARGEST:
        raise ValueError("its shape is impossible")
    return tuple(value)


def _text(value: dict[str, Any], key: str) -> str:
    found = value[key]
    if not isinstance(found, str):
        raise ValueError(f"its {key} is {_kind(found)}, not text")
    return found


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "something else")


FOLDERS = {"forward": "forward_real_data", "backward": "backward_real_data"}
_SHOWN = 200
_LONGEST_PATH = 4096


class RealData(FolderFiles):
    """The folders of values beside one JSON file. A file is named by its path from there, with slashes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, ())
        self.root = root
        self._folders: dict[tuple[str, ...], FolderFiles] = {}
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}

    def find(self, datapath: str) -> str:
        """The path, from the JSON's folder, of the file that `datapath` means; TensorDamaged when it lies elsewhere."""
        shown = datapath[:_SHOWN]
        path = PurePath(datapath)
        if not path.name or "\0" in datapath or len(datapath) > _LONGEST_PATH:
            raise TensorDamaged(f"its datapath {shown!r} names no file")
        inside = path
        folders = [at for at, part in enumerate(path.parts[:-1]) if part in FOLDERS.values()]
        if folders:  # wherever it stood when it was written
            inside = PurePath(*path.parts[folders[-1] :])
        elif path.is_absolute():
            try:
                inside = path.relative_to(self.root.absolute())
            except ValueError:
                raise TensorDamaged(
                    f"its file '{shown}' is not in {' or '.join(FOLDERS.values())}, nor beside the JSON; it was not opened"
                ) from None
        if ".." in inside.parts:
            raise TensorDamaged(f"its file '{shown}' is outside of the dump; it was not opened")
        return inside.as_posix()

    def open(self, name: str) -> tuple[int, int]:
        """A descriptor of the file at that path, and its size."""
        *folder, file = name.split("/")
        return self._in(tuple(folder)).open(file)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of the tensor in a file."""
        if name not in self._described:
            self._described[name] = self._read_description(name)
        return self._described[name]

    def size_bytes(self) -> int:
        """How many bytes the files of values take."""
        return sum(self._in((folder,)).size_bytes() for folder in FOLDERS.values())

    def close(self) -> None:
        """Give the descriptors of the folders back."""
        for files in self._folders.values():
            files.close()

    def _in(self, folder: tuple[str, ...]) -> FolderFiles:
        if folder not in self._folders:
            self._folders[folder] = FolderFiles(self.root, folder)
        return self._folders[folder]

    def _read_description(self, name: str) -> tuple[str, tuple[int, ...]]:
        descriptor, size = self.open(name)
        try:
            if not size:
                raise TensorDamaged(f"its file '{name[:_SHOWN]}' is empty")
            if name.endswith(".npy"):
                return describe_npy(os.pread(descriptor, LONGEST, 0), size)
            # Not closed here: an error may still hold a part of it. The mapping goes with its last user.
            return describe_saved(memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)))
        except (OSError, ValueError) as error:
            raise TensorDamaged(f"its file '{name[:_SHOWN]}' cannot be read: {error}") from None
        finally:
            os.close(descriptor)

"""Opening a dump of api_accuracy_checker: `forward_info_{pid}.json`, with `backward_info` and `stack_info` of the same pid beside it.

In: one of these files, or the folder that holds one set of them. Out: a `Run` of one step and one rank, or None when the
path is no such dump. Only names, and the beginning of the forward file, are read here. A folder with the files of several
processes is refused with their names: a pid tells neither which rank it was, nor whether it was the same training.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import RunDamaged, RunError, RunNotFound
from tensorprobe.legacy.layouts.checker_entries import DataFile, EntryReader, RealData
from tensorprobe.legacy.layouts.entries import FILE_BITS, EntrySegment, FileValues
from tensorprobe.legacy.layouts.msprobe_entries import demand_call_name, quote_bare, users_frames
from tensorprobe.legacy.layouts.value_files import FolderFiles
from tensorprobe.model import Call, Level, Stack
from tensorprobe.ops.names import FAMILY_SPELLINGS, CallName, parse_call_name
from tensorprobe.record.files import list_names, open_file, read_whole
from tensorprobe.record.foreign import foreign_run
from tensorprobe.record.lines import JSON_ERRORS, Damage, reason_of
from tensorprobe.record.run import Run
from tensorprobe.text import few

TOOL = "api_accuracy_checker"
UNFINISHED = ".api_accuracy_checker_"
"""What the folder of a recording begins with whose JSON files are not yet written; the pid follows. It is a run of ours."""
_NAME = re.compile(r"(forward|backward|stack)_info_(.+)\.json")
_HEAD = 1 << 20
_NOTE = "a dump of api_accuracy_checker holds inputs alone, and does not say which calls were left out of it"


def open_checker(path: Path, data: Path | None = None) -> Run | None:
    """Return the dump at `path`; None when it is not one of api_accuracy_checker. Its values cannot be elsewhere."""
    if data is not None:
        return None
    if path.is_dir():
        names = list_names(path)
        tags = sorted({match[2] for name in names if (match := _NAME.fullmatch(name)) and match[1] != "stack"})
        return _open_set(path, path, _only(path, tags)) if tags else None
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    if not path.is_file():
        raise RunNotFound(f"no file '{path}'.{_say_unfinished(path.parent, match[2])}")
    # The user chose the file, so it may be a link; its companions are beside the true one.
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    true_name = _NAME.fullmatch(file.name)
    if true_name is None:
        return open_checker_files(**{match[1]: path})
    return _open_set(path, file.parent, true_name[2])


def open_checker_files(forward: Path | None = None, backward: Path | None = None, stack: Path | None = None) -> Run:
    """The dump in files of any name, as the command line of the older tool takes them."""
    chosen = {}
    for kind, path in (("forward", forward), ("backward", backward), ("stack", stack)):
        if path is not None:
            if not path.is_file():
                match = _NAME.fullmatch(path.name)
                raise RunNotFound(f"no file '{path}'.{_say_unfinished(path.parent, match[2]) if match else ''}")
            file = Path(os.path.realpath(path))
            chosen[kind] = CheckerFile(file.parent, file.name)
    return _run(forward or backward or Path(), chosen)


def _open_set(path: Path, folder: Path, tag: str) -> Run:
    names = {kind: f"{kind}_info_{tag}.json" for kind in ("forward", "backward", "stack")}
    return _run(
        path, {kind: CheckerFile(folder, name) for kind, name in names.items() if os.path.lexists(folder / name)}
    )


def _run(path: Path, files: dict[str, CheckerFile]) -> Run:
    first = files.get("forward") or files["backward"]
    head, written = _look(first)
    if head.lstrip()[:1] not in (b"{", b""):
        raise RunDamaged(f"'{first}' is not a JSON object; {TOOL} writes nothing else.")
    settings = {"mode": "tensor" if b'"datapath"' in head else "summary"}
    segments = {(0, 0): CheckerSegment(files)}
    return foreign_run(path, TOOL, segments, written_s=written, settings=settings, note=_NOTE, one_rank=True)


def _only(folder: Path, tags: list[str]) -> str:
    if len(tags) > 1:
        raise RunError(
            f"'{folder}' holds the dumps of {len(tags)} processes: {few(tags)}.\n"
            f"  Pass the file of one of them: {folder / f'forward_info_{tags[0]}.json'}"
        )
    return tags[0]


def _say_unfinished(folder: Path, tag: str) -> str:
    recording = folder / f"{UNFINISHED}{tag}"
    if not recording.is_dir():
        return ""
    return (
        f"\n  Process {tag} was cut off before it was written. What it had recorded is a run: '{recording}'\n"
        "  run_ut writes the JSON files from it."
    )


def _look(file: CheckerFile) -> tuple[bytes, float]:
    """The beginning of a file, and when it was written."""
    with os.fdopen(open_file(file.folder, file.name), "rb") as content:
        return content.read(_HEAD), os.fstat(content.fileno()).st_mtime


@dataclass(frozen=True)
class CheckerFile:
    """One JSON file of the dump."""

    folder: Path
    name: str

    def __str__(self) -> str:
        return str(self.folder / self.name)


class EntryDamage(Damage):
    """An entry that breaks the format. `line` counts the entries of its file."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.file}, entry {self.line:,}: {self.reason}"


@dataclass(frozen=True)
class _Entry:
    """One key of a file, with what stands under it."""

    direction: str
    key: str
    number: int
    content: msgspec.Raw

    def call_name(self) -> CallName:
        """The canonical name; ValueError when the key is not the name of a call in this file."""
        op, number, direction = parse_call_name(self.key)
        if direction not in ("", self.direction):
            raise ValueError(f"the name of a {direction} call in the {self.direction} file")
        family, _, rest = op.partition(".")
        name = CallName(f"{FAMILY_SPELLINGS.get(family, family)}.{rest}", number, self.direction)
        demand_call_name(str(name) if rest else "")
        return name


class CheckerSegment(EntrySegment[_Entry]):
    """One set of files by their kind: forward, backward, stack."""

    def __init__(self, files: dict[str, CheckerFile]) -> None:
        super().__init__()
        self._json = files
        self._data = {kind: RealData(file.folder) for kind, file in files.items() if kind != "stack"}
        self.source = FileValues(_Sides(self._data), self.file_of)

    def stack(self, number: int) -> Stack | None:
        """The stack with that number, in the order of the stack file."""
        held = self._stacks
        if not 0 <= number < len(held):
            return None
        try:
            lines = msgspec.json.decode(list(held.values())[number], type=list[str])
        except JSON_ERRORS as error:
            raise RunDamaged(f"'{self._json['stack']}' is damaged at entry {number + 1}: {reason_of(error)}.") from None
        return Stack(number, users_frames(lines))

    def size_bytes(self) -> int:
        """How many bytes the files with values take."""
        folders = {files.root: files for files in self._data.values()}
        return sum(files.size_bytes() for files in folders.values())

    def _entries(self) -> list[_Entry]:
        return self._read_entries

    @cached_property
    def _read_entries(self) -> list[_Entry]:
        found = []
        for direction in ("forward", "backward"):
            if direction in self._json:
                held = _read(self._json[direction])
                found += [_Entry(direction, key, at, content) for at, (key, content) in enumerate(held.items())]
        return found

    @cached_property
    def _stacks(self) -> dict[str, msgspec.Raw]:
        return _read(self._json["stack"]) if "stack" in self._json else {}

    @cached_property
    def _stack_numbers(self) -> dict[str, int]:
        """Names of calls without their direction → numbers of stacks. A broken stack file must not hide the calls."""
        try:
            names = [parse_call_name(key) for key in self._stacks]
        except RunDamaged:
            return {}  # told by verify_run and by whoever asks for a stack
        return {f"{name.op}.{name.number}": number for number, name in enumerate(names)}

    def _name(self, entry: _Entry) -> str:
        return str(entry.call_name())

    def _make(self, line: int, entry: _Entry) -> Call:
        name = entry.call_name()
        paths: list[str] = []
        data = self._data[entry.direction]

        def find_file(datapath: str) -> DataFile:
            path = data.find(datapath)
            dtype, shape = data.describe(path)
            paths.append(f"{entry.direction}/{path}")
            return DataFile((line << FILE_BITS) + len(paths) - 1, dtype, shape)

        reader = EntryReader(find_file)
        content: Any = msgspec.json.decode(entry.content)
        args, kwargs = None, None
        if entry.direction == "forward":
            args, kwargs = reader.forward(content, name.op)
        else:
            reader.backward(content)
        self._files[line] = paths
        raw = parse_call_name(entry.key)
        return Call(
            name=str(name),
            level=Level.of(str(name)),
            stack=self._stack_numbers.get(f"{raw.op}.{raw.number}"),
            args=args,
            kwargs=kwargs,
            slots=tuple(reader.slots),
        )

    def _damage(self, line: int, entry: _Entry, error: Exception) -> Damage:
        file = self._json[entry.direction].name
        return EntryDamage(file, entry.number + 1, f"{entry.key[:80]!r}: {reason_of(error)}")


class _Sides(FolderFiles):
    """The files beside the forward and the backward JSON; a name begins with one of the two words."""

    def __init__(self, data: dict[str, RealData]) -> None:
        self._data = data

    def open(self, name: str) -> tuple[int, int]:
        direction, _, path = name.partition("/")
        return self._data[direction].open(path)


def _read(file: CheckerFile) -> dict[str, msgspec.Raw]:
    """Every key of a file with what stands under it; RunDamaged when it is not an object."""
    advice = "The process that wrote it may have been killed while it did: record again."
    try:
        raw = read_whole(file.folder, file.name)
    except FileNotFoundError:
        raise RunDamaged(f"'{file}' is missing.") from None
    try:
        try:
            return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # The older tool leaves NaN and Infinity bare, which is no JSON.
            return msgspec.json.decode(quote_bare(raw), type=dict[str, msgspec.Raw])
    except JSON_ERRORS as error:
        raise RunDamaged(f"'{file}' cannot be read: {reason_of(error)}.\n  {advice}") from None

"""Writes calls of a run as api_accuracy_checker does: forward, backward and stack as JSON, values as `.pt` files.

In: one step and rank of a `Run`, or calls that come one by one. Out: three files that appear at once, whole and standard
JSON, after the values they name. What the layout has no place for is left out and counted. Infinities and NaN are the
strings "Infinity", "-Infinity", "NaN": bare they would be no JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from tensorprobe.errors import NoData, RunError
from tensorprobe.files import Replacement
from tensorprobe.legacy.layouts.checker_entries import FOLDERS
from tensorprobe.legacy.layouts.checker_reader import UNFINISHED
from tensorprobe.model import DTYPES, Frame, Level
from tensorprobe.ops import Trait, has
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record.draining import trainer_is_alive
from tensorprobe.record.run import Run
from tensorprobe.record.stored import StoredCall, StoredSlot

_PLAIN = {bool: "bool", int: "int", float: "float", str: "str"}


class Written(NamedTuple):
    """Where a dump is, how many calls it holds, and how many of what were left out."""

    forward: Path
    backward: Path
    stack: Path
    forward_calls: int
    backward_calls: int
    left_out: dict[str, int]


def write_checker(
    run: Run, folder: Path, tag: str, *, step: int | None = None, rank: int | None = None, real: bool = False
) -> Written:
    """Write the calls of one step and rank into `folder`, as `forward_info_{tag}.json` and so on; `real` also their values.

    Files of that tag are replaced, the forward one last. OSError when the disk refuses.
    """
    return _Dump(run, folder, tag, real).write(step, rank)


class CallByCall:
    """A dump that holds a call as soon as it is added: its values are written once, the three files anew each time.

    What a forward call gave back is described besides: under autocast only that tells in which dtype it was computed.
    """

    def __init__(self, folder: Path, tag: str, *, many_ranks: bool = False) -> None:
        self._entries = _Entries(folder, real=True, many_ranks=many_ranks)
        self._paths = _paths(folder, tag)
        self._held: dict[str, dict[str, Any]] = {kind: {} for kind in self._paths}

    def add(self, calls: Mapping[StoredCall, Sequence[Frame]]) -> None:
        """Add calls with their stacks, all of them or, when the disk refuses (OSError), none. One of a name that is there is left out."""
        held = {kind: dict(entries) for kind, entries in self._held.items()}
        for call, frames in calls.items():
            key = _key(call)
            if key not in held[call.direction]:
                entry = held[call.direction][key] = self._entries.of(call, key)
                if call.direction == "forward":
                    entry["output"] = [_described(slot) for slot in call.outputs]
                held["stack"].setdefault(key, _lines(frames))
        with _opened(self._paths) as places:
            for kind, place in places.items():
                for key, entry in held[kind].items():
                    place.add(key, entry)
        self._held = held


class _Dump:
    def __init__(self, run: Run, folder: Path, tag: str, real: bool) -> None:
        self._run = run
        self._paths = _paths(folder, tag)
        self._entries = _Entries(folder, real=real, many_ranks=run.manifest.world_size > 1)
        self._left_out = self._entries.left_out

    def write(self, step: int | None, rank: int | None) -> Written:
        counts: Counter[str] = Counter()
        with _opened(self._paths) as places:
            for call in self._calls(step, rank):
                key = _key(call)
                places[call.direction].add(key, self._entries.of(call, key))
                counts[call.direction] += 1
                if call.direction == "forward":
                    stack = self._run.stack(call)
                    places["stack"].add(key, [] if stack is None else _lines(stack.frames))
        forward_path, backward_path, stack_path = self._paths.values()
        return Written(
            forward_path, backward_path, stack_path, counts["forward"], counts["backward"], dict(self._left_out)
        )

    def _calls(self, step: int | None, rank: int | None) -> Iterator[StoredCall]:
        if not self._run.segments():
            return
        seen: set[str] = set()
        for call in self._run.calls(step, rank, on_damage="skip"):
            if call.level is not Level.API or not parse_call_name(call.name).number:
                self._left_out["call of a module or of an ATen op"] += 1
            elif call.repeat or call.name in seen:
                self._left_out["call that was recorded before: recomputed, or a second backward"] += 1
            elif call.raised:
                self._left_out["call that raised"] += 1
            else:
                seen.add(call.name)
                yield call
        for at_step, at_rank in self._run.segments(step, rank):
            if damaged := len(self._run.damage(at_step, at_rank)):
                self._left_out["line of the record that is damaged"] += damaged


class _Entries:
    """What stands under the name of a call; `real`: its values are saved. What has no place is counted in `left_out`."""

    def __init__(self, folder: Path, *, real: bool, many_ranks: bool) -> None:
        self._folder, self.real, self._many_ranks = folder, real, many_ranks
        self.left_out: Counter[str] = Counter()
        for name in FOLDERS.values() if real else ():
            (folder / name).mkdir(exist_ok=True)

    def of(self, call: StoredCall, key: str) -> Any:
        return self._forward(call, key) if call.direction == "forward" else self._backward(call, key)

    def _forward(self, call: StoredCall, key: str) -> Any:
        tensors = _Tensors(self, call, key)
        args, kwargs = call.args or [], call.kwargs or {}
        entries = [tensors.entry(tree) for tree in args]
        if has(call.op, Trait.INDEXES) and len(args) > 1 and isinstance(args[1], list):
            entries[1] = {"type": "list", "value": entries[1]}
        return {"args": entries, "kwargs": {name: tensors.entry(tree) for name, tree in kwargs.items()}}

    def _backward(self, call: StoredCall, key: str) -> Any:
        """The gradients of the outputs in a list, null where an output has none."""
        tensors = _Tensors(self, call, key)
        entries: list[Any] = []
        for slot in call.inputs:
            steps = slot.name.split(".")[1:]
            if not steps or not all(step.isdecimal() and int(step) < 1024 for step in steps):
                self.left_out["gradient of a result that stands in no list"] += 1
                continue
            _put(entries, [int(step) for step in steps], tensors.tensor(slot))
        return entries

    def save(self, slot: StoredSlot, name: str) -> str | None:
        """Write the values of a slot into a file and give its path; None, and counted, when there are no values."""
        import torch

        try:
            tensor = slot.tensor()
        except (NoData, RunError):
            self.left_out["values that were not recorded"] += 1
            return None
        # Processes of one training share the folders of values, and each has a call of every name.
        prefix = f"rank{slot.call.rank}." if slot.call.rank or self._many_ranks else ""
        path = self._folder / FOLDERS[slot.call.direction] / f"{prefix}{name}.pt"
        torch.save(tensor.contiguous().clone(), path)
        return str(path.absolute())


class _Tensors:
    """The entries of one call; its files are numbered in the order in which they are met."""

    def __init__(self, entries: _Entries, call: StoredCall, key: str) -> None:
        self._entries, self._key = entries, key
        self._slots = {slot.name: slot for slot in call.slots}
        self._files = 0

    def entry(self, tree: Any) -> Any:
        """An argument tree as the layout has it."""
        if isinstance(tree, list):
            return [self.entry(part) for part in tree]
        if tree is None:
            return None
        if not isinstance(tree, dict):
            return {"type": _PLAIN[type(tree)], "value": tree}
        if "slot" in tree:
            slot = self._slots.get(tree["slot"])
            return {"type": "object", "value": "a tensor that was not recorded"} if slot is None else self.tensor(slot)
        kind: Any = tree.get("type")
        value: Any = tree.get("value")
        if kind in ("tuple", "torch.Size"):
            return [self.entry(part) for part in value]
        if kind == "dict":
            return {key: self.entry(part) for key, part in value.items()}
        if kind == "slice":
            return {"type": kind, "value": [self.entry(part) if isinstance(part, dict) else part for part in value]}
        if kind in ("torch.dtype", "torch.layout", "torch.memory_format"):
            return {"type": kind, "value": f"torch.{value}"}
        return {"type": kind, "value": value}

    def tensor(self, slot: StoredSlot) -> dict[str, Any]:
        """A tensor by its statistics, or by the path of its file."""
        if self._entries.real and slot.skipped is None:
            number, self._files = self._files, self._files + 1
            path = self._entries.save(slot, f"{self._key}.{number}".replace("/", "_"))
            if path is not None:
                return {"type": "torch.Tensor", "datapath": path, "requires_grad": slot.grad}
        entry = _described(slot)
        summary = slot.summary
        if summary is not None and slot.count:
            as_they_are = DTYPES[slot.dtype].kind if slot.dtype in DTYPES else "float"
            entry["Max"], entry["Min"] = _end(summary.max, as_they_are), _end(summary.min, as_they_are)
        elif slot.skipped is not None:
            entry["skipped"] = slot.skipped
        return {**entry, "requires_grad": slot.grad}


def _end(value: float | str, kind: str) -> Any:
    """One end of the range of a tensor, as a number of its kind."""
    number = float(value)
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return bool(number) if kind == "bool" else int(number) if kind == "int" else number


def _put(entries: list[Any], place: list[int], entry: Any) -> None:
    """Set `entries[i][j]…`, with null and lists where there was nothing."""
    for depth, at in enumerate(place):
        entries += [None] * (at + 1 - len(entries))
        if depth == len(place) - 1:
            entries[at] = entry
        else:
            entries[at] = below = entries[at] if isinstance(entries[at], list) else []
            entries = below


class _Object:
    """A JSON object that is written key by key: a large dump never stands in memory."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._between = "{\n"

    def add(self, key: str, value: Any) -> None:
        self._file.write(f"{self._between}{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
        self._between = ",\n"

    def end(self) -> None:
        self._file.write("{}\n" if self._between == "{\n" else "\n}\n")


def _paths(folder: Path, tag: str) -> dict[str, Path]:
    return {kind: folder / f"{kind}_info_{tag}.json" for kind in ("forward", "backward", "stack")}


def _key(call: StoredCall) -> str:
    return "*".join((*call.op.split(".", 1), str(call.number)))


def _described(slot: StoredSlot) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": f"torch.{slot.dtype}", "shape": list(slot.shape)}


def _lines(frames: Sequence[Frame]) -> list[str]:
    return [f"File {each.file}, line {each.line}, in {each.function}, \n {each.code}" for each in frames]


@contextmanager
def _opened(paths: Mapping[str, Path]) -> Iterator[dict[str, _Object]]:
    """An object to write for each file, the forward one to appear last."""
    with ExitStack() as files:
        places = {kind: _Object(files.enter_context(_replaced(path))) for kind, path in paths.items()}
        yield places
        for place in places.values():
            place.end()


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """A file to write, which takes the place of `path` when all is written, and is gone when not."""
    with Replacement(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


_LOOK_S = 1.0


def recording_folder(folder: Path, pid: int) -> Path:
    """Where process `pid` records whose files go into `folder`."""
    return folder / f"{UNFINISHED}{pid}"


def find_unfinished(file: Path) -> Path | None:
    """The recording from which a lacking `forward_info_{pid}.json` can be written, if there is one."""
    tag = file.name.partition("_info_")[2].removesuffix(".json")
    recording = file.parent / f"{UNFINISHED}{tag}"
    return recording if tag.isdecimal() and recording.is_dir() and not file.exists() else None


def finish_recording(recording: Path, *, has_ended: bool = False) -> Written | None:
    """Write the files of a recording that has ended, and remove it; None when somebody else has done so meanwhile.

    Without `has_ended` a RunError tells that the program still runs; with it, what its recorder still has to write is
    waited for. RunError too when the recording cannot be read; it stays then.
    """
    from tensorprobe.record.reader import open_run  # which knows all layouts, this one too

    with _locked(recording) as held:
        if not held:
            return None
        if _is_recorded(recording, wait=has_ended) and any(map(trainer_is_alive, open_run(recording).parts.values())):
            raise RunError(f"'{recording}' is still being recorded; its files are written when that ends.")
        run = open_run(recording)
        tag = recording.name.removeprefix(UNFINISHED)
        written = write_checker(run, recording.parent, tag, real=run.manifest.settings.get("mode") == "tensor")
        shutil.rmtree(recording)
    return written


def _is_recorded(recording: Path, *, wait: bool) -> bool:
    """Whether a recorder is at work there, which holds a lock on its part; or wait until none is.

    The process itself cannot be asked: one that is dead and not yet buried looks alive.
    """
    for part in recording.glob("rank*.json"):
        descriptor = os.open(part, os.O_RDONLY)
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return True
        except (ImportError, OSError):
            return not wait  # without locks the process is asked after all
        finally:
            os.close(descriptor)
    return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the folder is there, and ours alone until the end."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # without locks there is no guard to be kept apart from
        yield folder.exists()
    finally:
        os.close(descriptor)


class Guard:
    """Writes the files of a recording when this process dies without having done so."""

    def __init__(self, recording: Path) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from tensorprobe.legacy.layouts.checker_writer import guard; guard({str(recording)!r}, {os.getpid()})"
        )
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what is sent to the program's group must not end its guard
            )
        except OSError:
            self._process = None  # the recording then waits for whoever asks for its files

    def dismiss(self) -> None:
        """The files are written, or are to be left alone."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                self._process.communicate(b"done")
            self._process = None


def guard(recording: str, program: int) -> None:
    """Entry of the guard's process."""
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready:
            if os.read(0, 16):
                return
            break
        # Forked workers of a dead program may hold its end of the pipe open.
        if os.getppid() != program:
            break
    finish_recording(Path(recording), has_ended=True)

"""Write the tensors of a run as files that other programs read: numpy's `.npy`, torch's `.pt`, or `.safetensors`.

In: an open run and an empty folder. Out: `DIR/step0/rank0/<call>.<slot>.npy` or `.pt`, or one `DIR/step0/rank0.safetensors`
for each step and rank with `<call>.<slot>` as keys. numpy has no bfloat16 and no float8: those become float32 in `.npy`.
Every slot is counted as written or left out; nothing that exists is overwritten.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from tensorprobe.errors import NotFound, RunExists, SettingsError, TensorDamaged
from tensorprobe.model.dtypes import SAFETENSORS
from tensorprobe.record.elements import contiguous, widen
from tensorprobe.record.names import MODULE, is_inside, name_fits
from tensorprobe.record.run import Run, matching
from tensorprobe.record.stored import StoredCall, StoredSlot

ExportForm = Literal["npy", "pt", "safetensors"]
FORMS: tuple[ExportForm, ...] = ("npy", "pt", "safetensors")
_BLOCK = 1 << 22
"""Elements that are written at a time."""

MAX_FILE_NAME = 200
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=@-]")
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


@dataclass
class Exported:
    """What an export did. `left_out` counts the slots that were not exported, by reason."""

    folder: Path
    files: int = 0
    tensors: int = 0
    size_bytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    damaged_lines: int = 0


def export_run(
    run: Run,
    folder: str | Path,
    *,
    to: ExportForm,
    step: int | None = None,
    rank: int | None = None,
    call: str | None = None,
    progress: Callable[[], None] | None = None,
) -> Exported:
    """Write the chosen tensors into `folder`, which must be absent or empty. `call` is what `record.names` takes.

    RunExists for a folder that holds something, NotFound when nothing fits the choice. A damaged tensor or line
    is counted and left out.
    `progress` is called for each call that is done.
    """
    if to not in FORMS:
        raise SettingsError(f"cannot export to {to!r}. Choose one of {', '.join(FORMS)}.")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunExists(
            f"'{target}' exists and is not an empty folder; an export never overwrites. Choose a new folder."
        )
    result = Exported(target)
    found = 0
    places = run.segments(step, rank)
    fits = _choice(run, places, call)
    for at_step, at_rank in places:
        result.damaged_lines += len(run.damage(at_step, at_rank))
        calls = _chosen(run, at_step, at_rank, fits, progress)
        if to != "safetensors":
            found += _write_each(calls, target / f"step{at_step}" / f"rank{at_rank}", result, to)
        else:
            found += _write_safetensors(calls, target / f"step{at_step}" / f"rank{at_rank}.safetensors", result)
    if not found:
        raise NotFound(
            f"no call matches {call!r} in '{run.path}'. Nothing was written."
            if call
            else f"'{run.path}' holds no calls. Nothing was written."
        )
    return result


def _choice(run: Run, places: Sequence[tuple[int, int]], wanted: str | None) -> Callable[[StoredCall], bool]:
    """Return which calls a text stands for: those with such a name or, if there are none, those made in such a module."""
    if wanted is None:
        return lambda call: True
    if not wanted.startswith(MODULE) and any(matching(run.segment(*place).index().entries, wanted) for place in places):
        return lambda call: name_fits(call.name, wanted)
    path = wanted.removeprefix(MODULE)
    return lambda call: is_inside(call.module, path)


def _chosen(
    run: Run, step: int, rank: int, fits: Callable[[StoredCall], bool], progress: Callable[[], None] | None
) -> Iterator[StoredCall]:
    for call in run.calls(step, rank, on_damage="skip"):
        if progress is not None:
            progress()
        if fits(call):
            yield call


def _tensors(call: StoredCall, result: Exported) -> Iterator[tuple[str, StoredSlot]]:
    """Yield each slot that has values, with its name in the export."""
    repeat = f".repeat{call.repeat}" if call.repeat else ""
    for slot in call.slots:
        if slot.has_data:
            yield f"{call.name}{repeat}.{slot.name}", slot
        else:
            result.left_out[slot.skipped or "no values recorded"] += 1


def _write_each(calls: Iterator[StoredCall], folder: Path, result: Exported, form: str) -> int:
    """Write a file for each tensor, and return how many calls were found."""
    found = 0
    taken: dict[str, int] = {}
    for call in calls:
        found += 1
        for name, slot in _tensors(call, result):
            try:
                held = slot.stored() if form == "npy" else slot.tensor()
                itemsize = held.itemsize if form == "pt" else widen(held.flat[:0], slot.dtype).itemsize
            except TensorDamaged:
                result.left_out["damaged"] += 1
                continue
            folder.mkdir(parents=True, exist_ok=True)
            with _new_file(folder / safe_file_name(name, f".{form}", taken)) as file:
                save_tensor(held, file, slot.dtype)
            result.files += 1
            result.tensors += 1
            result.size_bytes += slot.model.count * itemsize
    return found


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write. If writing fails, no part of it is left."""
    with path.open("xb") as file:
        try:
            yield file
            file.flush()
        except BaseException:
            path.unlink()
            raise


def save_tensor(held: Any, file: IO[bytes], dtype: str = "float32") -> None:
    """Write a tensor as `.pt` with its own elements only, not its whole storage, or an array of numpy as `.npy`.

    If the array holds elements of another `dtype` as they are stored, `elements.widen` makes numbers of them.
    """
    import numpy

    if isinstance(held, numpy.ndarray):
        flat = numpy.asarray(held, order="C").reshape(-1)
        descr = numpy.lib.format.dtype_to_descr(widen(flat[:0], dtype).dtype)
        header = {"descr": descr, "fortran_order": False, "shape": held.shape}
        numpy.lib.format.write_array_header_1_0(file, header)
        for start in range(0, flat.size, _BLOCK):  # numpy.save does not say why a disk refuses
            file.write(widen(flat[start : start + _BLOCK], dtype).data)
    else:
        importlib.import_module("torch").save(held.detach().cpu().clone(), file)


def _write_safetensors(calls: Iterator[StoredCall], file: Path, result: Exported) -> int:
    """Write one file, tensor after tensor, so that memory holds one at a time; return how many calls were found."""
    found = end = 0
    header: dict[str, dict[str, Any]] = {}
    slots: list[StoredSlot] = []
    for call in calls:
        found += 1
        for name, slot in _tensors(call, result):
            code = SAFETENSORS.get(slot.dtype)
            if code is None or name in header:
                twice = "recorded twice under one name"
                result.left_out[twice if code is not None else f"safetensors has no {slot.dtype}"] += 1
                continue
            try:
                slot.numpy() if slot.dtype == "bool" else slot.buffer()  # a bool may hold other bytes than 0 and 1
            except TensorDamaged:
                result.left_out["damaged"] += 1
                continue
            header[name] = {"dtype": code, "shape": slot.shape, "data_offsets": (end, end := end + slot.nbytes)}
            slots.append(slot)
    if slots:
        packed = msgspec.json.encode(header)
        packed += b" " * (-len(packed) % 8)
        file.parent.mkdir(parents=True, exist_ok=True)
        with _new_file(file) as target:
            target.write(len(packed).to_bytes(8, "little") + packed)
            for slot in slots:
                target.write(contiguous(slot.buffer(), slot.model))
        result.files += 1
        result.tensors += len(slots)
        result.size_bytes += end
    return found


def safe_file_name(name: str, ending: str, taken: dict[str, int]) -> str:
    """Return a file name that every file system accepts and that is not in `taken`; add it to `taken`.

    Signs other than letters, digits and `._+=@-` become `_`. A name that was changed, is too long, or differs from
    another in its case only gets a digest of what it was.
    """
    safe = _UNSAFE.sub("_", name)
    if _DEVICES.fullmatch(safe) or safe.startswith((".", "-")):
        safe = f"_{safe}"
    chosen, again = safe + ending, f"/{name}"  # no file name has a slash
    tries = taken.get(again, 0)  # the search goes on where it ended: many equal names cost no more than others
    while (tries == 0 and safe != name) or len(chosen) > MAX_FILE_NAME or chosen.lower() in taken:
        digest = hashlib.blake2b(f"{tries}:{name}".encode(), digest_size=6).hexdigest()
        chosen, tries = f"{safe[: MAX_FILE_NAME - len(ending) - len(digest) - 1]}-{digest}{ending}", tries + 1
    taken[again], taken[chosen.lower()] = tries, 0
    return chosen

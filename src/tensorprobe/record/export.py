"""Write the tensors of a run as files that other programs read: numpy's `.npy`, torch's `.pt`, or `.safetensors`.

In: an open run and an empty folder. Out: `DIR/step0/rank0/<call>.<slot>.npy` or `.pt`, or one `DIR/step0/rank0.safetensors`
for each step and rank with `<call>.<slot>` as keys. numpy has no bfloat16 and no float8: those become float32 in `.npy`.
Every slot is counted as written or left out; nothing that exists is overwritten.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from tensorprobe.errors import NotFound, RunExists, SettingsError, TensorDamaged
from tensorprobe.record.run import Run
from tensorprobe.record.stored import StoredCall, StoredSlot

if TYPE_CHECKING:
    import torch

ExportForm = Literal["npy", "pt", "safetensors"]
FORMS: tuple[ExportForm, ...] = ("npy", "pt", "safetensors")

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
    """Write the chosen tensors into `folder`, which must be absent or empty. `call` is a glob on the name of the call.

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
    if to == "safetensors":
        _demand_safetensors()
    result = Exported(target)
    found = 0
    for at_step, at_rank in run.segments(step, rank):
        result.damaged_lines += len(run.damage(at_step, at_rank))
        calls = _chosen(run, at_step, at_rank, call, progress)
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


def _chosen(
    run: Run, step: int, rank: int, glob: str | None, progress: Callable[[], None] | None
) -> Iterator[StoredCall]:
    for call in run.calls(step, rank, on_damage="skip"):
        if progress is not None:
            progress()
        if glob is None or fnmatch.fnmatchcase(call.name, glob) or call.name.startswith(glob + "."):
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
    taken: set[str] = set()
    for call in calls:
        found += 1
        for name, slot in _tensors(call, result):
            try:
                held = slot.numpy() if form == "npy" else slot.tensor()
            except TensorDamaged:
                result.left_out["damaged"] += 1
                continue
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / safe_file_name(name, f".{form}", taken)).open("xb") as file:
                save_tensor(held, file)
            result.files += 1
            result.tensors += 1
            result.size_bytes += held.nbytes
    return found


def save_tensor(held: Any, file: IO[bytes]) -> None:
    """Write a numpy array as `.npy`, or a tensor as `.pt` with its own elements only, not its whole storage."""
    import numpy

    if isinstance(held, numpy.ndarray):
        numpy.save(file, held, allow_pickle=False)
    else:
        importlib.import_module("torch").save(held.detach().cpu().clone(), file)


def _write_safetensors(calls: Iterator[StoredCall], file: Path, result: Exported) -> int:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    found = 0
    tensors: dict[str, torch.Tensor] = {}
    owners: set[int] = set()
    known: dict[str, bool] = {}
    for call in calls:
        found += 1
        for name, slot in _tensors(call, result):
            if not known.setdefault(slot.dtype, _safetensors_has(slot.dtype)):
                result.left_out[f"safetensors has no {slot.dtype}"] += 1
            elif name in tensors:
                result.left_out["recorded twice under one name"] += 1
            else:
                try:
                    tensor = slot.tensor().contiguous()
                except TensorDamaged:
                    result.left_out["damaged"] += 1
                    continue
                # Slots with equal values share memory in a run; safetensors requires each to have its own.
                tensors[name] = tensor.clone() if tensor.data_ptr() in owners else tensor
                owners.add(tensor.data_ptr())
    if tensors:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, file)
        except SafetensorError as error:  # a full disk, in the words of another language
            file.unlink(missing_ok=True)
            raise SettingsError(
                f"cannot write '{file}': {error}.\n  Free some space, or choose another folder."
            ) from None
        result.files += 1
        result.tensors += len(tensors)
        result.size_bytes += sum(tensor.nbytes for tensor in tensors.values())
    return found


def _safetensors_has(dtype: str) -> bool:
    """Return whether the installed safetensors can write this dtype; the only way to know is to try."""
    import torch
    from safetensors.torch import save

    try:
        save({"x": torch.zeros(1, dtype=torch.uint8).repeat(16).view(getattr(torch, dtype))})
    except Exception:
        return False
    return True


def _demand_safetensors() -> None:
    try:
        importlib.import_module("safetensors.torch")
    except ImportError:
        raise SettingsError(
            "exporting to safetensors needs the package safetensors.\n  pip install 'tensorprobe[safetensors]'"
        ) from None


def safe_file_name(name: str, ending: str, taken: set[str]) -> str:
    """Return a file name that every file system accepts and that is not in `taken`; add it to `taken`.

    Signs other than letters, digits and `._+=@-` become `_`. A name that was changed, is too long, or differs from
    another in its case only gets a digest of what it was.
    """
    safe = _UNSAFE.sub("_", name)
    if _DEVICES.fullmatch(safe) or safe.startswith((".", "-")):
        safe = f"_{safe}"
    chosen, tries = safe + ending, 0
    while (tries == 0 and safe != name) or len(chosen) > MAX_FILE_NAME or chosen.lower() in taken:
        digest = hashlib.blake2b(f"{tries}:{name}".encode(), digest_size=6).hexdigest()
        chosen, tries = f"{safe[: MAX_FILE_NAME - len(ending) - len(digest) - 1]}-{digest}{ending}", tries + 1
    taken.add(chosen.lower())
    return chosen

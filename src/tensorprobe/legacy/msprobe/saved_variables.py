"""`PrecisionDebugger.save`: variables of a program by names of their own, in debug.json, with the gradients that reach them.

Written at once, by the program's own process. `thing.0.debug` is the variable as it was; `thing_grad.0.debug` its gradients,
when all of them have come, or when the step ends. A hook on a tensor keeps no tensor and changes nothing; those whose
gradients never came are taken off at the end of the step. Nothing is raised: what cannot be saved is told.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_arguments
from tensorprobe.legacy.layouts.dump_files import npy_header
from tensorprobe.legacy.layouts.msprobe_json import argument_entry, open_dump, tensor_entry
from tensorprobe.legacy.layouts.pt_writer import frame_tensor
from tensorprobe.legacy.layouts.targets import MSPROBE_VALUES, prepare_target
from tensorprobe.legacy.msprobe import logger
from tensorprobe.legacy.msprobe.config import DumpConfig, make_target
from tensorprobe.model import DTYPES, Slot
from tensorprobe.model.event import SlotEvent
from tensorprobe.model.interrupts import let_through
from tensorprobe.numerics.summary import summarize_buffer
from tensorprobe.record.elements import to_numpy
from tensorprobe.record.export import safe_file_name
from tensorprobe.taps.backward import watch_gradient

_KINDS = (torch.Tensor, bool, int, float, str, dict, tuple, list)
_PLACE = "input.0"
_ALIGNMENT = 64


class SavedVariables:
    """The variables of one step. OSError or RunExists when their folder cannot be made."""

    def __init__(self, config: DumpConfig, folder: Path) -> None:
        self._form = make_target(config, folder)
        self._held = prepare_target(self._form)
        self._file = open_dump(self._form)
        self._values = folder / MSPROBE_VALUES
        self._counts: Counter[str] = Counter()
        self._waiting: list[_Gradients] = []
        self._taken: dict[str, int] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def save(self, variable: Any, name: str, *, gradients: bool) -> None:
        """Write a variable now, and its gradients when they come."""
        if not isinstance(name, str) or not name or not isinstance(variable, _KINDS):
            what = f"a {type(variable).__name__}" if isinstance(name, str) and name else f"the name {name!r}"
            logger.warning(
                "save: %s cannot be saved. It takes tensors, numbers, texts, lists and dicts, and a name.", what
            )
            return
        if os.getpid() != self._pid:
            return  # a forked child: the file is its parent's
        with self._lock, torch_names.no_overrides(), torch.no_grad():
            number = self._counts[name]
            self._counts[name] += 1
            try:
                tensors: Tensors = []
                tree = flatten_arguments((variable,), {}, tensors)[0][0]
                key = f"{name}.{number}.debug"
                held = {slot: self._entry(f"{key}{slot.removeprefix(_PLACE)}", tensor) for slot, tensor in tensors}
                self._file.add(key, argument_entry(tree, held))
                self._file.flush()
                if gradients:
                    self._await_gradients(f"{name}_grad.{number}.debug", tree, tensors)
            except Exception as error:  # of the disk, or of a tensor of a kind that nobody here has met
                let_through(error)
                logger.warning("save(%r) has saved nothing: %s: %s", name, type(error).__name__, error)

    def close(self) -> None:
        """The step is over: write what has come of gradients, and take the hooks off."""
        if os.getpid() == self._pid:
            with self._lock:
                for gradients in list(self._waiting):
                    self._finish(gradients)
        self._file.close()
        if self._held != -1:
            os.close(self._held)

    def _await_gradients(self, key: str, tree: Any, tensors: Tensors) -> None:
        gradients = _Gradients(key, tree)
        self._waiting.append(gradients)
        for slot, tensor in tensors:
            if tensor.requires_grad:
                gradients.hooks[slot] = watch_gradient(tensor, self._hook(gradients, slot))
        if not gradients.hooks:
            self._finish(gradients)

    def _hook(self, gradients: _Gradients, slot: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if os.getpid() != self._pid:
                return
            with self._lock:
                handle = gradients.hooks.pop(slot, None)
                if handle is None:
                    return  # a second backward: the first one is what is saved
                handle.remove()
                try:
                    path = f"{gradients.key}{slot.removeprefix(_PLACE)}"
                    gradients.entries[slot] = self._entry(path, gradient)
                    if not gradients.hooks:
                        self._finish(gradients)
                except Exception as error:
                    let_through(error)
                    logger.warning("%s is not saved: %s: %s", gradients.key, type(error).__name__, error)

        return hook

    def _finish(self, gradients: _Gradients) -> None:
        if gradients in self._waiting:
            self._waiting.remove(gradients)
            for handle in gradients.hooks.values():
                handle.remove()
            self._file.add(gradients.key, _only_tensors(gradients.tree, gradients.entries))
            self._file.flush()

    def _entry(self, path: str, tensor: torch.Tensor) -> dict[str, Any]:
        """What is said of a tensor, whose values are in their file if files are wanted."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        slot = SlotEvent(path, dtype, shape, str(tensor.device), None, tensor.requires_grad)
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            return tensor_entry(slot, None)
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = memoryview(flat.view(torch.uint8).numpy()).cast("B") if flat.numel() else memoryview(b"")
        entry = tensor_entry(slot, summarize_buffer(content, DTYPES[dtype]))
        checksum = zlib.crc32(content)
        if self._form.digests:
            entry["md5"] = f"{checksum:08x}"
        if self._form.values is not None:
            name = safe_file_name(path, f".{self._form.values}", self._taken)
            self._write(self._values / name, content, slot, checksum)
            entry["data_name"] = name
        return entry

    def _write(self, path: Path, content: memoryview, slot: SlotEvent, checksum: int) -> None:
        if self._form.values == "npy":
            array = to_numpy(content, Slot(name=slot.name, dtype=slot.dtype, shape=slot.shape))
            parts: list[bytes | memoryview] = [npy_header(array.dtype.str, array.shape, _ALIGNMENT), array.tobytes()]
        else:
            frame = frame_tensor(slot.dtype, slot.shape, checksum=checksum, multiple=_ALIGNMENT)
            parts = [frame.head, content, frame.tail]
        with path.open("wb") as file:
            file.writelines(parts)


class _Gradients:
    """Of one saved variable: those that have come, and the hooks that wait for the others."""

    def __init__(self, key: str, tree: Any) -> None:
        self.key, self.tree = key, tree
        self.entries: dict[str, dict[str, Any]] = {}
        self.hooks: dict[str, Any] = {}


def _only_tensors(tree: Any, entries: dict[str, dict[str, Any]]) -> Any:
    """The shape of a variable, with null for what has no gradient."""
    if isinstance(tree, list):
        return [_only_tensors(part, entries) for part in tree]
    if isinstance(tree, dict) and "slot" in tree:
        return entries.get(tree["slot"])
    if isinstance(tree, dict) and tree.get("type") == "tuple":
        return _only_tensors(tree["value"], entries)
    if isinstance(tree, dict) and tree.get("type") == "dict":
        return {key: _only_tensors(part, entries) for key, part in tree["value"].items()}
    return None

"""Runs written by hand as docs/format.md says: so that the reader and the spec are compared, not the reader and our writer.

A run from numpy arrays, for everything that compares two runs:

    a = [call("Functional.linear.0.forward", inputs=[x, w], outputs=[y], module="layers.0")]
    write(tmp_path / "a", a)

`write_run` takes the lines and bytes themselves, for everything that reads one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tensorprobe.model import DTYPES
from tensorprobe.numerics.summary import json_summary, summarize_buffer

Call = dict[str, Any]
MANIFEST: dict[str, Any] = {
    "format": "tensorprobe-run",
    "version": 1,
    "tool": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.9",
    "created": "2026-01-02T03:04:05Z",
    "world_size": 1,
    "settings": {"level": "api", "mode": "tensor"},
}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_manifest(root: Path, **changes: Any) -> None:
    write_json(root / "manifest.json", {**MANIFEST, **changes})


def write_rank(root: Path, rank: int = 0, **changes: Any) -> None:
    part = {"rank": rank, "pid": 1, "host": "elsewhere", "device": "cpu", "steps": [0], "closed": True}
    write_json(root / f"rank{rank}.json", {**part, **changes})


def write_calls(root: Path, calls: list[dict[str, Any]] | bytes, *, step: int = 0, rank: int = 0) -> Path:
    """Write calls.jsonl: a line for each dict, or the bytes as they are. Returns the folder."""
    folder = root / f"step{step}" / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    raw = calls if isinstance(calls, bytes) else b"".join(json.dumps(call).encode() + b"\n" for call in calls)
    (folder / "calls.jsonl").write_bytes(raw)
    return folder


class Blob:
    """The content of a tensors.bin: 64-byte aligned, equal bytes once."""

    def __init__(self) -> None:
        self.content = b""
        self._places: dict[bytes, int] = {}

    def add(self, data: bytes) -> int:
        if data not in self._places:
            self.content += b"\0" * (-len(self.content) % 64)
            self._places[data] = len(self.content)
            self.content += data
        return self._places[data]


def slot(name: str, dtype: str, shape: list[int], data: bytes, blob: Blob, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": dtype,
        "shape": shape,
        "offset": blob.add(data),
        "nbytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
        **more,
    }


def write_run(root: Path, calls: list[dict[str, Any]] | bytes, content: bytes = b"", **rank: Any) -> Path:
    """A run of one step and rank; returns the folder of that step and rank."""
    write_manifest(root)
    count = calls.count(b"\n") if isinstance(calls, bytes) else len(calls)
    write_rank(root, **{"coverage": {"seen": count, "recorded": count}, **rank})
    folder = write_calls(root, calls)
    if content:
        (folder / "tensors.bin").write_bytes(content)
    return folder


class Tensor:
    """An array with what numpy cannot say of it: a dtype of torch's, a stride, that it is a parameter, why it was skipped."""

    def __init__(
        self,
        array: Any,
        *,
        dtype: str | None = None,
        stride: Sequence[int] | None = None,
        grad: bool = False,
        skipped: str | None = None,
    ) -> None:
        self.array = np.asarray(array)
        self.dtype = dtype or str(self.array.dtype)
        self.stride, self.grad, self.skipped = stride, grad, skipped


def call(
    name: str,
    *,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    parameters: dict[str, Any] | None = None,
    **more: Any,
) -> Call:
    """A call whose slots are input.0, input.1, ..., output.0, ... and parameters by name."""
    slots = {f"input.{at}": value for at, value in enumerate(inputs)}
    slots |= {f"parameters.{key}": value for key, value in (parameters or {}).items()}
    slots |= {f"output.{at}": value for at, value in enumerate(outputs)}
    return {"name": name, "slots": slots, **more}


def write(
    root: Path,
    calls: Sequence[Call] | dict[tuple[int, int], Sequence[Call]],
    *,
    mode: str = "tensor",
    stacks: Sequence[dict[str, Any]] = (),
    closed: bool = True,
) -> Path:
    """A run: the calls of step 0 and rank 0, or of each (step, rank). mode: tensor, summary, bare summary (no digest) or structure."""
    segments = calls if isinstance(calls, dict) else {(0, 0): calls}
    ranks = sorted({rank for _, rank in segments})
    write_manifest(root, world_size=len(ranks), settings={"level": "api", "mode": mode.split()[-1]})
    for rank in ranks:
        mine = {step: held for (step, other), held in segments.items() if other == rank}
        count = sum(len(held) for held in mine.values())
        write_rank(root, rank, steps=sorted(mine), closed=closed, coverage={"seen": count, "recorded": count})
        for step, held in mine.items():
            blob = Blob()
            lines = [{**each, "slots": _slots(each["slots"], blob, mode)} for each in held]
            folder = write_calls(root, lines, step=step, rank=rank)
            if mode == "tensor":
                (folder / "tensors.bin").write_bytes(blob.content)
            if stacks:
                (folder / "stacks.jsonl").write_text("".join(json.dumps(stack) + "\n" for stack in stacks))
    return root


def _slots(slots: dict[str, Any], blob: Blob, mode: str) -> list[dict[str, Any]]:
    made = []
    for name, value in slots.items():
        tensor = value if isinstance(value, Tensor) else Tensor(value)
        more: dict[str, Any] = {"grad": True} if tensor.grad else {}
        if tensor.skipped:
            made.append(
                {"name": name, "dtype": tensor.dtype, "shape": list(tensor.array.shape), "skipped": tensor.skipped}
            )
            continue
        if tensor.stride is not None:
            more["stride"] = list(tensor.stride)
        data = tensor.array.tobytes()
        entry = slot(name, tensor.dtype, list(tensor.array.shape), data, blob, **more)
        entry["summary"] = json_summary(summarize_buffer(data, DTYPES[tensor.dtype]))
        for key in _ABSENT[mode]:
            del entry[key]
        made.append(entry)
    return made


_ABSENT: dict[str, tuple[str, ...]] = {
    "tensor": (),
    "summary": ("offset", "nbytes"),
    "bare summary": ("offset", "nbytes", "digest"),
    "structure": ("offset", "nbytes", "digest", "summary"),
}

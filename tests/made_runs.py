"""Runs made from numpy arrays, written as docs/format.md says: for everything that compares two runs.

a = [call("Functional.linear.0.forward", inputs=[x, w], outputs=[y], module="layers.0")]
write(tmp_path / "a", a)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorprobe.model import DTYPES
from tensorprobe.numerics.summary import json_summary, summarize_buffer
from tests.record.handmade import Blob, slot, write_manifest

Call = dict[str, Any]
TORCH_NAMES = {"float32": "float32", "float64": "float64", "float16": "float16", "int64": "int64", "bool": "bool"}


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
        part = {"rank": rank, "pid": 1, "host": "elsewhere", "device": "cpu", "steps": sorted(mine), "closed": closed}
        part["coverage"] = {"seen": count, "recorded": count}
        (root / f"rank{rank}.json").write_text(json.dumps(part))
        for step, held in mine.items():
            folder = root / f"step{step}" / f"rank{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            blob = Blob()
            lines = [json.dumps({**each, "slots": _slots(each["slots"], blob, mode)}) + "\n" for each in held]
            (folder / "calls.jsonl").write_text("".join(lines))
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
        shape = more.pop("shape", list(tensor.array.shape))
        entry = slot(name, tensor.dtype, shape, data, blob, **more)
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

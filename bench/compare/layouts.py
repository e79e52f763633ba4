"""The two layouts in which the compare benchmark stores the same tensors: a run of ours, and a dump of the peer's.

Ours follows docs/format.md. The peer's is what its 26.2 release writes: an index of all calls in one JSON file with a
file beside it for each tensor.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from bench.compare.plan import PlannedCall, PlannedSlot
from tensorprobe.model import Call, Coverage, Frame, Manifest, RankPart, Slot, Stack, Summary
from tensorprobe.model.manifest import FORMAT_NAME, FORMAT_VERSION
from tensorprobe.numerics.summary import Moments
from tensorprobe.version import VERSION

ALIGNMENT = 64
BUFFER_BYTES = 4 << 20
FRAMES = (
    Frame("model.py", 88, "forward", "x = x + self.mlp(self.norm_2(x))"),
    Frame("train.py", 31, "main", "loss = model(batch)"),
)


class StoredSlot(NamedTuple):
    """One tensor and what is known of it; `raw` and `tensor` are None when only its statistics are stored."""

    slot: PlannedSlot
    moments: Moments
    digest: str
    raw: Any
    tensor: torch.Tensor | None


class NativeLayout:
    """Writes one step of one rank as a closed run."""

    def __init__(self, run: Path, *, values: bool) -> None:
        self._run = run
        self._folder = run / "step0" / "rank0"
        self._folder.mkdir(parents=True)
        self._mode = "tensor" if values else "summary"
        self._calls_file = (self._folder / "calls.jsonl").open("wb", buffering=BUFFER_BYTES)
        self._tensors_file = (self._folder / "tensors.bin").open("wb", buffering=BUFFER_BYTES) if values else None
        self._size = 0
        self._calls = self._slots = 0

    def add(self, call: PlannedCall, stored: list[StoredSlot]) -> None:
        """The next call."""
        arguments = [{"slot": item.name} if isinstance(item, PlannedSlot) else item for item in call.arguments]
        line = Call(
            name=call.name,
            module=call.module,
            stack=0 if self._tensors_file else None,  # a summary run has no stacks unless asked for
            args=arguments or None,
            slots=tuple(self._store(item) for item in stored),
        )
        self._calls_file.write(msgspec.json.encode(line) + b"\n")
        self._calls += 1
        self._slots += len(stored)

    def _store(self, item: StoredSlot) -> Slot:
        offset = None
        if self._tensors_file is not None:
            gap = -self._size % ALIGNMENT
            self._tensors_file.write(bytes(gap))
            offset = self._size + gap
            self._tensors_file.write(item.raw)
            self._size = offset + item.slot.nbytes
        return Slot(
            name=item.slot.name,
            dtype=item.slot.dtype,
            shape=item.slot.shape,
            summary=Summary(*item.moments),
            digest=item.digest,
            offset=offset,
            nbytes=item.slot.nbytes,
        )

    def close(self) -> None:
        """Ends the run: its manifest, the part of its only rank, its only stack."""
        self._calls_file.close()
        if self._tensors_file is not None:
            self._tensors_file.close()
        manifest = Manifest(
            format=FORMAT_NAME,
            version=FORMAT_VERSION,
            tool=VERSION,
            torch=str(torch.__version__),
            python="",
            created="2024-01-01T00:00:00+00:00",
            world_size=1,
            settings={"level": "api", "mode": self._mode},
        )
        coverage = Coverage(seen=self._calls, recorded=self._calls, slots=self._slots, bytes_written=self._size)
        part = RankPart(rank=0, pid=os.getpid(), host=socket.gethostname(), steps=[0], closed=True, coverage=coverage)
        (self._run / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        (self._run / "rank0.json").write_bytes(msgspec.json.encode(part))
        if self._tensors_file is not None:
            (self._folder / "stacks.jsonl").write_bytes(msgspec.json.encode(Stack(id=0, frames=FRAMES)) + b"\n")


class PeerLayout:
    """Writes one step of one rank as the peer's PrecisionDebugger leaves it at its level L1."""

    def __init__(self, folder: Path, *, values: bool) -> None:
        self._folder = folder
        self._data_folder = folder / "dump_tensor_data"
        self._values = values
        (self._data_folder if values else folder).mkdir(parents=True)
        self._data: dict[str, Any] = {}

    def add(self, call: PlannedCall, stored: list[StoredSlot]) -> None:
        """The next call."""
        entries = {item.slot.name: self._store(call.name, item) for item in stored}
        given = [entries[slot.name] for slot in call.outputs]
        if call.name.endswith(".backward"):
            self._data[call.name] = {"input": [entries[slot.name] for slot in call.inputs], "output": given}
            return
        arguments = [entries[item.name] if isinstance(item, PlannedSlot) else _scalar(item) for item in call.arguments]
        self._data[call.name] = {"input_args": arguments, "input_kwargs": {}, "output": given}

    def _store(self, call: str, item: StoredSlot) -> dict[str, Any]:
        high, low, mean, norm, _, _ = item.moments
        entry: dict[str, Any] = {
            "type": "torch.Tensor",
            "dtype": f"torch.{item.slot.dtype}",
            "shape": item.slot.shape,
            "Max": high,
            "Min": low,
            "Mean": mean,
            "Norm": norm,
            "requires_grad": False,
        }
        if item.tensor is not None:
            entry["data_name"] = f"{call}.{item.slot.name}.pt"
            torch.save(item.tensor, self._data_folder / entry["data_name"])
        return entry

    def close(self) -> None:
        """Writes the index and its companions."""
        index = {
            "task": "tensor" if self._values else "statistics",
            "level": "L1",
            "framework": "pytorch",
            "dump_data_dir": str(self._data_folder) if self._values else None,
            "data": self._data,
        }
        lines = [f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.code}" for frame in FRAMES]
        for name, content in (("dump", index), ("stack", {"0": [list(self._data), lines]}), ("construct", {})):
            text = msgspec.json.format(msgspec.json.encode(content), indent=1)
            (self._folder / f"{name}.json").write_bytes(text)


def _scalar(value: Any) -> Any:
    """An argument that is no tensor, as the peer's index has it."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_scalar(item) for item in value]
    return {"type": type(value).__name__, "value": value}

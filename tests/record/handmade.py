"""Tiny runs written by hand as docs/format.md says, with nothing of ours: so that reader and spec are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

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

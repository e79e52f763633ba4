"""What a run says of itself: one `manifest.json`, and one part for each rank."""

from __future__ import annotations

from typing import Any

import msgspec

FORMAT_NAME = "tensorprobe-run"
FORMAT_VERSION = 2


class Manifest(msgspec.Struct, frozen=True):
    """`manifest.json`: written once, when the first rank starts."""

    format: str
    version: int
    tool: str
    torch: str
    python: str
    created: str
    world_size: int
    settings: dict[str, Any]
    provenance: dict[str, Any] = {}
    """Command, code, packages, environment and switches, since version 2."""


class Coverage(msgspec.Struct, frozen=True):
    """What was seen and what became of it. seen = recorded + filtered + failed. `limits`: what this torch cannot do."""

    seen: int = 0
    recorded: int = 0
    filtered: int = 0
    failed: int = 0
    slots: int = 0
    slots_skipped: dict[str, int] = {}
    bytes_seen: int = 0
    bytes_written: int = 0
    blind_spots: dict[str, int] = {}
    unmatched: dict[str, list[str]] = {}
    notes: list[str] = []
    first_error: str | None = None
    limits: list[str] = []


class RankPart(msgspec.Struct, frozen=True):
    """`rank{R}.json`: written when the rank starts, replaced when it ends with `closed` true."""

    rank: int
    pid: int
    host: str
    device: str = "cpu"
    coordinates: dict[str, int] = {}
    steps: list[int] = []
    closed: bool = False
    coverage: Coverage = Coverage()

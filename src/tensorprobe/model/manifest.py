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
    exit_code: int | None = None
    """Of the command that `tensorprobe capture` ran, once it has ended."""

    @property
    def lacks(self) -> str:
        """What a run of an older format does not say; empty for one of today, and for a dump of another tool."""
        if self.format != FORMAT_NAME or self.version >= FORMAT_VERSION:
            return ""
        return (
            f"format {self.version} does not record the command, its exit code, packages and switches, the role of a tensor, "
            "the phase of a call, and which memory was never written"
        )


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
    moved_to: str | msgspec.UnsetType = msgspec.UNSET
    """Where the folder of the run is, if it was moved while it was written."""


class RankPart(msgspec.Struct, frozen=True):
    """`rank{R}.json`: written when the rank starts, replaced after each step, and when it ends with `closed` true."""

    rank: int
    pid: int
    host: str
    device: str = "cpu"
    coordinates: dict[str, int] = {}
    steps: list[int] = []
    closed: bool = False
    coverage: Coverage = Coverage()
    ended: int | None = None
    """The last step whose end was seen. What follows it may be a part of a step."""
    raised: str = ""
    """The exception that ended the program, if one did."""

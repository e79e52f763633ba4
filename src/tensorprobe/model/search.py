"""What `tensorprobe find` did and found: the executions of both commands, whether each repeats itself, the answer."""

from __future__ import annotations

import msgspec

from tensorprobe.model.comparison import Comparison
from tensorprobe.model.precheck import Audit

SEARCH_VERSION = 1


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of one command."""

    run: str
    """The folder of what it recorded."""
    command: list[str]
    settings: dict[str, str]
    """What was recorded, as settings of a capture."""
    exit_code: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded with values."""

    steps: list[int]
    ranks: list[int]
    """Empty: all."""
    names: list[str]
    """Empty: every call of these steps and ranks."""
    calls: int
    """How many calls these are, forward and backward."""
    of_calls: int
    size_bytes: int
    """About how many bytes of values one run will have."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `tensorprobe find`, and how it was found. `tensorprobe find --json` prints it."""

    schema_version: int
    tool: str
    exit_code: int
    """0: the runs agree. 1: they diverge. 2: they cannot be compared."""
    executions: list[Execution]
    repeats: dict[str, Comparison]
    """`baseline`, `candidate` → two executions of the same command, compared."""
    comparison: Comparison
    """Baseline and candidate, with values where they were recorded."""
    window: Window | None = None
    inside: Comparison | None = None
    """The same at ATen level, inside the diverging call."""
    audits: dict[str, Audit] = {}
    """`values`, `inside` → the candidate alone, where the baseline has no values and cannot be run."""
    notes: list[str] = []

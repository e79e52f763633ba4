"""The result of an online compare: every ATen call repeated on a reference while the program ran."""

from __future__ import annotations

import msgspec

from tensorprobe.model.reason import NotCompared

WITHOUT_NUMBERS = (NotCompared.VIEW, NotCompared.MEMORY, NotCompared.NO_TENSOR, NotCompared.STORAGE)
"""Why calls are not compared that compute nothing."""


class OnlineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one call against the reference. `api` is the call of torch's API it was made in, or in whose backward."""

    call: str
    slot: str
    step: int
    rank: int
    order: int
    """The zero-based index among the compared calls of the process."""
    api: str = ""
    module: str = ""
    stack: list[str] = []
    dtype: str = ""
    shape: list[int] = []
    result: str = "pass"
    """pass or fail."""
    judged_by: str = ""
    measured: float = 0.0
    allowed: float = 0.0
    message: str = ""
    reference: str = ""
    """The dtype of the reference."""
    relative_l2: float = 0.0
    one_minus_cosine: float = 0.0
    max_abs: float = 0.0
    accumulated: float | None = None
    """With a chain: the relative error against a reference that never saw the device's numbers."""
    inherited: float | None = None
    """The largest such error of the call's inputs."""
    saved: str = ""
    """The folder with the inputs and outputs, and a script that runs the call again."""

    @property
    def op(self) -> str:
        """The name without number and direction."""
        return self.call.rsplit(".", 2)[0]


class OpCount(msgspec.Struct, kw_only=True):
    """The calls of one op: how many there were, how many of them failed, and the worst relative error of those that did not."""

    compared: int = 0
    failed: int = 0
    worst: float = 0.0


class OnlineResult(msgspec.Struct, frozen=True, kw_only=True):
    """All counts add up: `seen` calls are compared, skipped for a reason, not sampled, filtered or broken."""

    reference: str
    policy: str
    rank: int = 0
    steps: list[int] = []
    seen: int = 0
    compared: int = 0
    failed: int = 0
    filtered: int = 0
    unsampled: int = 0
    broken: int = 0
    """Calls on which the tool itself failed, which is no verdict on them."""
    first_error: str | None = None
    skipped: dict[str, dict[str, int]] = {}
    """Reason → op → how often."""
    ops: dict[str, OpCount] = {}
    failures: list[OnlineRow] = []
    """The first of them, in the order of execution."""
    healed: int = 0
    chained: int = 0
    reseeded: int = 0
    """How often a shadow of the chain was out of date and taken anew from the device."""
    diverged: list[OnlineRow] = []
    """With a chain: where the accumulated error was the largest."""
    blind_spots: dict[str, int] = {}
    stopped: bool = False

    @property
    def exit_code(self) -> int:
        """0 when every compared call agrees, 1 when one fails, 2 when none was compared."""
        return 1 if self.failed else 0 if self.compared else 2

    def __bool__(self) -> bool:
        return self.exit_code == 0

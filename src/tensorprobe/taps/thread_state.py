"""What is known of each thread of the program while a probe is on. It holds no tensors and installs nothing."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

from tensorprobe.taps.stacks import OuterStack


class Recompute(NamedTuple):
    """A forward that is being recomputed. Its calls get the numbers they had the first time.

    `task` is the pass of the autograd engine it runs in. A backward started inside it is another pass, and no repetition.
    """

    numbers: dict[str, int]
    microbatch: int | None
    keeps_graph: bool
    task: int


class ThreadState(threading.local):
    """Where one thread is."""

    def __init__(self) -> None:
        self.busy = False
        self.phase = ""
        self.modules: list[str] = []
        self.calls: list[str] = []
        self.recompute: Recompute | None = None
        self.ordinal: int | None = None
        self.outer_stack: OuterStack | None = None
        self.call_stack: int | None = None
        self.region: str | None = None
        self.detaches = False
        """Whether the next ATen call, if it detaches a tensor, is one that our hooks on saved tensors have caused."""
        self.detached: weakref.ref[Any] | None = None
        """What the last recorded `detach` has returned, where torch shows each of them twice."""

    def is_detached(self, args: Any) -> bool:
        """Return whether the argument was returned by the last recorded `detach`; the next question is about another."""
        last, self.detached = self.detached, None
        return last is not None and bool(args) and last() is args[0]

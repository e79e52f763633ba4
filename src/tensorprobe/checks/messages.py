"""What a process that checks calls is told, and what it answers: structs that go through a pipe as msgpack, never a pickle."""

from __future__ import annotations

import msgspec

from tensorprobe.model.precheck import CallCheck

READY, REFUSED, DONE = b"r", b"x", b"d"
"""The first byte of an answer: the process can begin; the settings or the run cannot be used; a check is finished."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs before its first call."""

    run: str
    data_folder: str | None
    device: str
    data: str
    standard: str
    backward: bool
    hard: bool
    threads: int
    """For large calls; small ones have one thread, so that their figures do not depend on how many processes there are."""
    failures: str | None
    """Where failing calls are saved."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one call; one line of the journal."""

    check: CallCheck
    replay: str = ""
    """The script that was saved for a failing call."""
    trouble: str = ""
    """What went wrong in the check itself, or in saving a failure."""
    ends: bool = False
    """The device does not answer any more: the process ends after this."""


class Refusal(msgspec.Struct, frozen=True):
    """A mistake of the user that was noticed in a process."""

    kind: str
    message: str

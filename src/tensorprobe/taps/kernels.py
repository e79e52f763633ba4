"""The ATen calls of one function that is called here, dumped whatever else is watched at the moment.

For a call that is run once more by the tool itself: no probe is started, and one that runs goes on unaware of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.legacy.layouts.forms import AclForm, make_place
from tensorprobe.model import Coverage
from tensorprobe.record.writer import RunWriter
from tensorprobe.taps.dispatch_tap import DispatchTap
from tensorprobe.taps.select import Selection
from tensorprobe.taps.session import Session
from tensorprobe.taps.snapshot import Snapshots

_RING_BYTES = 16 << 20


def dump_kernels(function: Callable[[], Any], folder: Path, *, sides: Sequence[str], rank: int = 0) -> Coverage:
    """Call the function, with the tensors of every ATen call in it in a file each. What it raises is passed on."""
    form = AclForm(str(folder))
    writer = RunWriter(
        folder, rank, keep_data=True, ring_bytes=_RING_BYTES, in_process=True, form=form, place=make_place(form)
    )
    session = Session(writer, Snapshots(writer, mode="tensor", floating_only=False), Selection(sides=sides), None)
    session.begin_step(0)
    session.recording = True
    try:
        with DispatchTap(session):
            function()
    finally:
        session.recording = False
        writer.close(msgspec.to_builtins(session.coverage()), {}, "")
    return session.coverage() if writer.part is None else writer.part.coverage

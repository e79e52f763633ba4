"""Records a dump in an older tool's layout instead of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.legacy.layouts.targets import KernelTarget, Target, prepare_target
from tensorprobe.model import Coverage, RankPart
from tensorprobe.model.sink import Needs
from tensorprobe.record.run_sink import RecordSettings, RunSink
from tensorprobe.taps import watch_kernels

_RING_BYTES = 16 << 20


class DumpSink(RunSink):
    """Writes the layout that `target` describes. What an earlier dump left there is replaced."""

    def __init__(self, out: str | os.PathLike[str], target: Target, *, needs: Needs | None = None) -> None:
        super().__init__(out, needs=needs)
        self._target = target

    def check(self, rank: int) -> None:
        """Do nothing: `open` refuses what is no dump."""

    def open(self, rank: int, world_size: int, settings: RecordSettings) -> None:
        """Make the place ready and start the recorder, which holds its lock."""
        tag: Any = self._target.__struct_config__.tag
        options = msgspec.to_builtins(self._target)
        self._start(rank, world_size, settings, layout=tag, layout_options=options, lock=prepare_target(self._target))

    def _read_part(self) -> RankPart | None:
        return self._writer.part


def dump_kernels(function: Callable[[], Any], folder: Path, *, sides: Sequence[str], rank: int = 0) -> Coverage:
    """Call the function and dump the tensors of every ATen call in it, a file each. What it raises is passed on.

    For a call that the tool itself runs once more.
    """
    sink = DumpSink(folder, KernelTarget(str(folder)))
    return watch_kernels(function, sink, rank=rank, sides=sides, ring_bytes=_RING_BYTES, in_process=True)

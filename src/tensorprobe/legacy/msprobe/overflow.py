"""`task: overflow_check`: the calls that overflow are dumped in msprobe's layout, and the training ends after so many.

A call overflows if it makes a NaN or inf from finite inputs, as in `tensorprobe.overflow`. The infinities of masks do not count.
`overflow_nums` counts over all steps of a process; -1 is no end.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.legacy.layouts.dump_sink import DumpSink
from tensorprobe.legacy.layouts.targets import MsprobeTarget
from tensorprobe.legacy.msprobe import logger
from tensorprobe.legacy.msprobe.config import DumpConfig
from tensorprobe.model import Coverage
from tensorprobe.model.event import Event
from tensorprobe.model.sink import CallRules
from tensorprobe.taps.settings import CaptureSettings

if TYPE_CHECKING:
    from tensorprobe.watches.overflow import KeptCall

_NO_LIMIT = 1 << 62
_counted: dict[int, int] = {}
"""The overflows so far, by the settings that they were looked for with: a step is a dump of its own, the count is not."""


class OverflowDump:
    """The overflows of one rank in one step."""

    def __init__(
        self, config: DumpConfig, folder: Path, *, model: Any, rank: int, numbers: dict[str, int] | None
    ) -> None:
        from tensorprobe.watches.overflow import OverflowWatch

        self._config, self._folder = config, folder
        self.numbers: dict[str, int] = {}
        target = MsprobeTarget(
            str(folder),
            task="overflow_check",
            level="L1",  # API calls are dumped, whatever level the settings name
            values=config.file_format,  # type: ignore[arg-type]  # checked by read_config
            continued=numbers is not None,
        )
        self._dump = DumpSink(folder / target.index, target)
        self._dump.open(rank, 1, CaptureSettings.of(ring_bytes=32 << 20, in_process=True))
        self._dump.begin_step(0)
        self._stacks, self._sealed = 0, False
        self._scratch = tempfile.TemporaryDirectory(prefix="tensorprobe-")
        most = config.overflow_nums
        try:
            self._watch = OverflowWatch(
                model,
                out=self._scratch.name,
                stop_after=None if most == -1 else max(1, most - _counted.get(id(config), 0)),
                stop_with=self._end,
                on_first=self._found_one,
                keep_bytes=_NO_LIMIT,
                replay=False,
                rank=rank,
                steps_by="call",
                rules=CallRules(operators=True, numbers=numbers or {}),
            ).start()
        except BaseException:
            self._close()
            raise

    def stop(self) -> Coverage | None:
        """Watch no more, and wait until all is on disk."""
        self._watch.stop()
        self.numbers = self._watch.numbers
        self._close()
        return None

    def _close(self) -> None:
        self._seal()
        self._scratch.cleanup()

    def _seal(self) -> None:
        """Have all on disk; nothing comes after it."""
        if self._sealed:
            return
        self._sealed = True
        self._dump.close(Coverage(), {}, "")
        if self._dump.failure is not None:
            logger.error("%s", self._dump.failure)

    def _found_one(self, kept: KeptCall) -> None:
        """Dump a call that has just overflowed, and whose backward it is if it is one."""
        count = _count(self._config)
        frames = [(frame.file, frame.line, frame.function) for frame in kept.first.frames]
        self._dump.stack(self._stacks, frames)
        call = kept.call
        slots = self._dump.take(list(kept.tensors.items()))
        stack, args, kwargs = self._stacks, call.args, call.kwargs
        self._dump.call(Event(call.name, module=call.module, stack=stack, args=args, kwargs=kwargs, slots=slots))
        self._stacks += 1
        logger.warning("[overflow %d times]: %s overflowed", count, call.name)

    def _end(self) -> Exception:
        """What ends the training. The dump is whole before it is raised."""
        self._seal()
        return ValueError(
            f"[overflow {_counted[id(self._config)]} times]: dump file is saved in '{self._folder / 'dump.json'}'."
        )


def _count(config: DumpConfig) -> int:
    """One more under these settings; how many there are now."""
    number = id(config)
    if number not in _counted:
        weakref.finalize(config, _counted.pop, number)  # settings of a later debugger may get the same number
    _counted[number] = _counted.get(number, 0) + 1
    return _counted[number]


def start_overflow(
    config: DumpConfig, folder: Path, *, model: Any, rank: int, numbers: dict[str, int] | None = None
) -> OverflowDump:
    """Watch for overflows, and dump the calls that have them into `folder`, which is `…/step0/rank0`.

    With the `numbers` that calls had at the end of an earlier turn it goes on in that one's dump.
    """
    return OverflowDump(config, folder, model=model, rank=rank, numbers=numbers)

"""When a program is recorded, and its end: by the batches of its DataLoader, or by `set_dump_switch`.

A recording ends with `set_dump_switch("OFF")`, with the iteration that was asked for, or with the process; its files are
then in `dump_path`. A recording that begins again in the same process replaces them, and counts calls from 0.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from pathlib import Path

from tensorprobe.errors import SettingsError, TensorprobeError
from tensorprobe.legacy.checker import logger, speak
from tensorprobe.legacy.checker.config import msCheckerConfig
from tensorprobe.legacy.layouts.checker_writer import Guard, finish_recording, recording_folder
from tensorprobe.legacy.wrapped import RULES
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.sink import Needs
from tensorprobe.record.run_sink import RunSink
from tensorprobe.taps import Probe
from tensorprobe.taps.step_taps import LoaderTap


@dataclass
class _Recording:
    """One at work."""

    pid: int
    folder: Path
    probe: Probe
    guard: Guard
    by_loader: bool


class _Watch:
    """What this process records, and by what it tells iterations."""

    def __init__(self) -> None:
        self._recording: _Recording | None = None
        self._recorded: set[Path] = set()
        self._again = False
        self._tap: LoaderTap | None = None

    def watch(self) -> None:
        """Begin to count the batches of the program's DataLoader; nothing when that is done already."""
        if self._tap is None:
            self._tap = LoaderTap(self._before_batch, self._after_batch)
            self._tap.install()
            atexit.register(self._at_exit)

    def begin(self, *, by_loader: bool, step: str = "") -> None:
        """Record from here on, in the folder `step` of `dump_path`; nothing when that is done already."""
        if self._recording is not None and self._recording.pid == os.getpid():
            self._recording.by_loader |= by_loader
            if not by_loader and not self._again:
                self._again = True
                logger.info('set_dump_switch("ON") again: the recording goes on. set_dump_switch("OFF") ends it.')
            return
        home = Path(msCheckerConfig.dump_path, step)
        home.mkdir(exist_ok=True)
        folder = recording_folder(home, os.getpid())
        if folder in self._recorded:
            logger.info("Recording again: the files of this process are replaced.")
        # Results are not part of this layout: run_ut computes them anew.
        mode = "tensor" if msCheckerConfig.real_data else "summary"
        sink = RunSink(folder, overwrite=True, needs=Needs(rules=RULES))
        ops = [f"*.{name}" for name in msCheckerConfig.white_list]
        probe = Probe(folder, sink=sink, mode=mode, stacks=True, sides=["input"], ops=ops).start()
        self._recording = _Recording(os.getpid(), folder, probe, Guard(folder), by_loader)
        self._recorded.add(folder)

    def end(self) -> None:
        """Stop, and write the files. What hinders that is told; the program goes on."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.probe.stop()
        if recording.pid != os.getpid():
            return  # a forked child: the recording is its parent's
        try:
            written = finish_recording(recording.folder, has_ended=True)
        except (OSError, TensorprobeError) as error:
            let_through(error)
            logger.error("The JSON files are not written: %s\n  run_ut writes them from '%s'.", error, recording.folder)
            return
        finally:
            recording.guard.dismiss()
        if written is None:
            logger.error("'%s' is gone: somebody removed it while it was recorded.", recording.folder)
            return
        logger.info(
            "Recorded %d forward and %d backward calls: '%s', '%s', '%s'.",
            written.forward_calls,
            written.backward_calls,
            *(written.forward, written.backward.name, written.stack.name),
        )
        for what, count in written.left_out.items():
            logger.info("Left out: %s (%d times).", what, count)

    def _before_batch(self, number: int) -> None:
        """The loader is asked for a batch: the iteration before is over, whether there is another one or not."""
        recording = self._recording
        if recording is None or recording.pid != os.getpid() or not recording.by_loader:
            return
        if not msCheckerConfig.enable_dataloader:
            return
        last = msCheckerConfig.iterations[-1]
        if number <= last:
            self.end()
        else:
            self._unwatch()
            self.end()
            # Exactly this text and type: the guide shows it, and scripts look for it.
            raise Exception(f"Model pretest: exit after iteration {number - 1}.")

    def _after_batch(self, number: int) -> None:
        wanted = msCheckerConfig.iterations
        if msCheckerConfig.enable_dataloader and number in wanted:
            self.begin(by_loader=True, step=f"step{number}" if len(wanted) > 1 else "")

    def _unwatch(self) -> None:
        if self._tap is not None:
            self._tap.remove()

    def _at_exit(self) -> None:
        self._unwatch()
        self.end()
        tap = self._tap
        if tap is None or not msCheckerConfig.enable_dataloader:
            return
        wanted = msCheckerConfig.iterations
        if self._recorded:
            if missed := [number for number in wanted[1:] if number >= tap.batches]:
                logger.warning("Not recorded: iterations %s; the DataLoader gave %d batches.", missed, tap.batches)
            return
        logger.warning(
            "Nothing was recorded in this process: its DataLoader gave %d batches, iteration %d was never reached.%s\n"
            '  Set target_iter, or call set_dump_switch("ON") where an iteration begins.',
            tap.batches,
            wanted[0],
            f" {tap.elsewhere} batches went to other threads, which are not counted." if tap.elsewhere else "",
        )


_watch = _Watch()


def watch() -> None:
    """Begin to count the batches of the program's DataLoader."""
    speak()
    _watch.watch()


def set_dump_switch(switch: str) -> None:
    """Begin to record ("ON") or end it and write the files ("OFF"), whatever a DataLoader does."""
    speak()
    if switch not in ("ON", "OFF"):
        raise SettingsError(f'set_dump_switch takes "ON" or "OFF"; got {switch!r}.')
    if switch == "ON":
        _watch.begin(by_loader=False)
    else:
        _watch.end()

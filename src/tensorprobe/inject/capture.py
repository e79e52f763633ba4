"""Starts a probe in an unmodified script, at its first module call or at its first call of torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from tensorprobe.model.interrupts import let_through
from tensorprobe.record import writer
from tensorprobe.taps.beginnings import before_first_call, before_first_module
from tensorprobe.taps.perturb import change_threads, move_by_one_unit
from tensorprobe.text import size

_NOT_SEEN = "calls before the first call of a module are not recorded; --from start records them"
_LONG_S, _AGAIN_S = 2.0, 0.5


class EndLine:
    """One line on a terminal that shows how far the end of a capture has come, if it takes more than two seconds.

    A program that ends can start no thread, so there is no bar.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._started: float | None = None
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show how many bytes are written; remove the line when all are."""
        now = self._clock()
        self._started = now if self._started is None else self._started
        elapsed = now - self._started
        try:
            if done >= total and self._shown:
                self._out.write("\r\x1b[K")
                self._out.flush()
            elif done < total and elapsed >= _LONG_S and now - self._shown >= _AGAIN_S:
                left = f", about {elapsed * (total - done) / done:.0f} s left" if done else ""
                self._out.write(f"\rtensorprobe: writing the record, {size(done)} of {size(total)}{left}\x1b[K")
                self._out.flush()
                self._shown = now
        except (OSError, ValueError):  # the terminal is gone
            self._shown = 0.0


def begin(payload: str) -> None:
    """Record with the settings in the JSON `payload`, from the beginning that it names."""
    if sys.stderr is not None and sys.stderr.isatty():
        writer.close_watch = EndLine(sys.stderr)
    orders = json.loads(payload)
    if (perturb := orders.get("perturb")) is not None and perturb["kind"] == "threads":
        change_threads(perturb["number"])
    if orders["from"] == "start":
        before_first_call(partial(_start, orders))
    else:
        before_first_module(partial(_start, orders))


def _start(orders: dict[str, Any], module: nn.Module | None = None) -> None:
    """Start the probe, unless the script captures itself. Errors go to stderr, and training continues."""
    from tensorprobe.errors import RunExists
    from tensorprobe.record.run_folder import attempt_place, own_place
    from tensorprobe.record.run_sink import RunSink
    from tensorprobe.taps.probe import Probe, active_probe
    from tensorprobe.taps.ranks import find_rank

    if active_probe() is not None:
        sys.stderr.write("tensorprobe: the script captures by itself; nothing is recorded from outside.\n")
        return
    if module is not None and (perturb := orders.get("perturb")) is not None and perturb["kind"] == "ulp":
        move_by_one_unit(module, perturb["number"])
    out = attempt_place(Path(orders["out"]))
    remarks = [] if module is None else [_NOT_SEEN]
    settings = {"model": module, "remarks": remarks, **orders["settings"]}

    def start(place: Path, *, overwrite: bool = False) -> None:
        sink = RunSink(place, overwrite=overwrite, about={"recorded from": orders["from"]})
        Probe(place, sink=sink, **settings).start()

    try:
        if not _is_taken(out, find_rank(), orders["started"]):
            try:
                start(out, overwrite=orders["overwrite"])
                return
            except RunExists:
                if not _is_taken(out, find_rank(), orders["started"]):
                    raise
        start(own_place(out))
    except Exception as error:
        let_through(error)
        sys.stderr.write(f"tensorprobe: not recording. {type(error).__name__}: {error}\n")


def _is_taken(out: Path, rank: int, started: float) -> bool:
    """Return whether another process of this command records as this rank."""
    try:
        return (out / f"rank{rank}.json").stat().st_mtime >= started
    except OSError:
        return False

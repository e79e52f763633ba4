"""`register_hook(model, overflow_check)`: every API call that overflows is dumped, and the training ends after so many.

What counts as an overflow is what `tensorprobe.overflow` calls a birth: finite inputs, and an output that is not; the
infinities of a mask are none. Nothing is raised in the training but the guide's ValueError, once; after it nothing is
watched any more. Files that cannot be written are told in the log and in that error.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.layouts.checker_writer import CallByCall
from tensorprobe.legacy.ptdbg import acl, logger
from tensorprobe.legacy.ptdbg.overflow_files import as_stored, missing, with_outputs, write_overflow
from tensorprobe.model.call_name import underscored
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.taps.operators import OlderWays
from tensorprobe.taps.ranks import find_world_size, main_device

if TYPE_CHECKING:
    from tensorprobe.model.overflow import Birth
    from tensorprobe.watches.overflow import BornCall, OverflowWatch

_ALL_OF_IT = 1 << 62


@dataclass(frozen=True)
class Order:
    """A checked `register_hook(model, overflow_check, …)`."""

    model: Any
    folder: Path
    """Of the rank."""
    rank: int
    most: int
    """With which overflow the training ends."""
    acl: acl.DumpConfig | None = None


def read_count(overflow_nums: Any) -> int:
    """`overflow_nums`; SettingsError when it is no number of overflows."""
    if isinstance(overflow_nums, bool) or not isinstance(overflow_nums, int) or overflow_nums < 1:
        raise SettingsError(
            f"overflow_nums is {overflow_nums!r}; it must be a whole number from 1: with that overflow the training ends."
        )
    return overflow_nums


class OverflowCheck:
    """From `register_hook` on; watching from `start` to `stop`, any number of times."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._device = main_device(order.model)
        self._on_npu = order.acl is not None and acl.device_is_npu(order.model)
        if self._on_npu:
            acl.warn_of_queue()
        self._home = Path.cwd()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        """For what the watch itself writes; the older layout has no place for it."""
        self._json: CallByCall | None = None
        self._watch: OverflowWatch | None = None
        self._everything = False
        self._said = ""
        self.count = 0

    @property
    def watching(self) -> bool:
        """Not any more when the training was ended, though the watch itself can only go later."""
        return self._watch is not None and self.count < self._order.most

    def start(self, *, everything: bool = False) -> None:
        """Watch. Numbers of calls begin from 0, as with `set_dump_switch("ON")`; overflows are counted on."""
        self._everything = everything
        if self.watching:
            return
        self.stop()
        if self.count >= self._order.most:
            logger.warning("overflow check: it has ended with overflow %d. Call register_hook again.", self.count)
            return
        from tensorprobe.watches.overflow import OverflowWatch  # programs that only dump need not load it

        self._scratch = tempfile.TemporaryDirectory(prefix="tensorprobe-")
        try:
            self._watch = OverflowWatch(
                self._order.model,
                out=self._scratch.name,
                stop_after=self._order.most - self.count,
                stop_with=self._end,
                on_birth=self._born,
                keep_bytes=_ALL_OF_IT,
                replay=False,
                rank=self._order.rank,
                ways=OlderWays(numbers_go_on=True),
            ).start()
        except BaseException:
            self._scratch.cleanup()
            raise

    def stop(self) -> None:
        """Watch no more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _end(self) -> Exception:
        """What ends the training."""
        return ValueError(f"[overflow {self.count} times]: {self._said}")

    def _born(self, born: BornCall) -> None:
        """Dump a call that has just overflowed."""
        self.count += 1
        name = underscored(born.call.name)
        try:
            pkl = self._write(born)
        except OSError as error:
            self._said = f"{name} overflowed; its dump file could not be saved: {error}."
            logger.error("[overflow %d times]: %s", self.count, self._said)
            return
        self._said = f"dump file is saved in '{pkl}'."
        logger.warning("[overflow %d times]: %s overflowed, %s", self.count, name, self._said)
        self._tell_where(born.birth)
        if self._order.acl is not None:
            self._dump_kernels(born, self._order.acl, pkl)

    def _write(self, born: BornCall) -> Path:
        order = self._order
        call = as_stored(born.call, born.tensors, order.rank, self._home)
        if lost := missing(call):
            logger.warning("Not in the dump, since nobody has it any more: %s", ", ".join(lost))
        frames = born.birth.frames
        if self._json is None:
            self._json = CallByCall(self._home, str(os.getpid()), many_ranks=find_world_size() > 1)
        entries = {call: frames}
        if born.forward is not None:  # without it nobody can run the backward again
            forward = with_outputs(born.forward, born.call)
            entries[as_stored(forward, born.forward_inputs, order.rank, self._home)] = frames
        pkl = write_overflow(order.folder, self.count, call, frames, self._everything)
        self._json.add(entries)
        return pkl

    def _tell_where(self, birth: Birth) -> None:
        held = [f"{each.slot} {each.dtype} {each.shape} has {each.nan} NaN, {each.inf} inf" for each in birth.outputs]
        module = f" in module {birth.module}" if birth.module else ""
        called = f", called at {birth.frames[0]}" if birth.frames else ""
        logger.info("%s%s%s", "; ".join(held), module, called)

    def _dump_kernels(self, born: BornCall, config: acl.DumpConfig, pkl: Path) -> None:
        """The kernels of a forward call. A backward needs a second run, with the gradients that were dumped just now."""
        name = underscored(born.call.name)
        if born.call.direction == "backward":
            gradients = sorted(map(str, pkl.with_suffix("").glob(f"{name}_input*.npy")))
            logger.info(
                "For the kernels of %s run once more with\n"
                "  register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='%s')\n"
                '  set_dump_switch("ON", mode="acl", scope=["%s"])\n'
                "  set_backward_input(%s)",
                *(name, config.file, name, gradients),
            )
            return
        order = self._order
        inputs = {slot: tensor for slot, tensor in born.tensors.items() if not slot.startswith("output")}
        try:
            place = acl.dump_again(born.call, inputs, config, device=self._device, rank=order.rank, on_npu=self._on_npu)
        except CannotReplay as reason:
            logger.warning("%s: its kernels are not dumped: %s.", name, reason)
        else:
            logger.info("%s: its kernels are in '%s'.", name, place)

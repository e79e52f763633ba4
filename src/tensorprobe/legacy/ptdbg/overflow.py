"""`register_hook(model, overflow_check)`: every API call that overflows is dumped, and the training ends after so many.

A call overflows if it makes a NaN or inf from finite inputs, as in `tensorprobe.overflow`. The infinities of masks do not count.
In the training only the guide's ValueError is raised, once; then the watch ends. The log and that error name files that could not
be written.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy
import torch

from tensorprobe.errors import SettingsError
from tensorprobe.files import replace_file
from tensorprobe.legacy.layouts.checker_writer import CallByCall
from tensorprobe.legacy.layouts.dump_files import numbers_in
from tensorprobe.legacy.layouts.ptdbg_lines import WITHOUT_STATISTICS, stack_line_name, write_line_name
from tensorprobe.legacy.ptdbg import acl, logger
from tensorprobe.model import DTYPES, Call, Frame, Slot
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.sink import CallRules
from tensorprobe.ops.names import underscored
from tensorprobe.record.export import safe_file_name
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.taps.ranks import find_world_size, main_device

if TYPE_CHECKING:
    from tensorprobe.model.overflow import FirstNonfinite
    from tensorprobe.watches.overflow import KeptCall, OverflowWatch


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
                on_first=self._found_one,
                keep_bytes=_ALL_OF_IT,
                replay=False,
                rank=self._order.rank,
                rules=CallRules(numbers_go_on=True),
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

    def _found_one(self, kept: KeptCall) -> None:
        """Dump a call that has just overflowed."""
        self.count += 1
        name = underscored(kept.call.name)
        try:
            pkl = self._write(kept)
        except OSError as error:
            let_through(error)
            self._said = f"{name} overflowed; its dump file could not be saved: {error}."
            logger.error("[overflow %d times]: %s", self.count, self._said)
            return
        self._said = f"dump file is saved in '{pkl}'."
        logger.warning("[overflow %d times]: %s overflowed, %s", self.count, name, self._said)
        self._tell_where(kept.first)
        if self._order.acl is not None:
            self._dump_kernels(kept, self._order.acl, pkl)

    def _write(self, kept: KeptCall) -> Path:
        order = self._order
        call = as_stored(kept.call, kept.tensors, order.rank, self._home)
        if lost := missing(call):
            logger.warning("Not in the dump, since nobody has it any more: %s", ", ".join(lost))
        frames = kept.first.frames
        if self._json is None:
            self._json = CallByCall(self._home, str(os.getpid()), many_ranks=find_world_size() > 1)
        entries = {call: frames}
        if kept.forward is not None:  # without it nobody can run the backward again
            forward = with_outputs(kept.forward, kept.call)
            entries[as_stored(forward, kept.forward_inputs, order.rank, self._home)] = frames
        pkl = write_overflow(order.folder, self.count, call, frames, self._everything)
        self._json.add(entries)
        return pkl

    def _tell_where(self, first: FirstNonfinite) -> None:
        held = [f"{each.slot} {each.dtype} {each.shape} has {each.nan} NaN, {each.inf} inf" for each in first.outputs]
        module = f" in module {first.module}" if first.module else ""
        called = f", called at {first.frames[0]}" if first.frames else ""
        logger.info("%s%s%s", "; ".join(held), module, called)

    def _dump_kernels(self, kept: KeptCall, config: acl.DumpConfig, pkl: Path) -> None:
        """The kernels of a forward call. A backward needs a second run, with the gradients that were dumped just now."""
        name = underscored(kept.call.name)
        if kept.call.direction == "backward":
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
        inputs = {slot: tensor for slot, tensor in kept.tensors.items() if not slot.startswith("output")}
        try:
            place = acl.dump_again(kept.call, inputs, config, device=self._device, rank=order.rank, on_npu=self._on_npu)
        except CannotReplay as reason:
            logger.warning("%s: its kernels are not dumped: %s.", name, reason)
        else:
            logger.info("%s: its kernels are in '%s'.", name, place)


STEP = WITHOUT_STATISTICS + 1


class HeldValues:
    """The values of a call that are in memory and not on disk: a `ByteSource`. A slot's offset is its place in the list."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._left = dict(tensors)
        self._held: list[torch.Tensor] = []

    def give(self, slot: Slot) -> Slot:
        """The slot as one whose values can be read from here, if they are here and its own."""
        tensor = self._left.get(slot.name)
        if tensor is None or tensor.numel() != slot.count or str(tensor.dtype) != f"torch.{slot.dtype}":
            return slot
        self._held.append(self._left.pop(slot.name).detach().contiguous())
        return msgspec.structs.replace(
            slot,
            shape=tuple(tensor.shape),
            stride=None,
            offset=len(self._held) - 1,
            nbytes=tensor.numel() * tensor.itemsize,
        )

    def read(self, slot: Slot) -> memoryview:
        tensor = self._held[slot.offset or 0]
        return memoryview(tensor.flatten().view(torch.uint8).numpy())

    def hold(self, slot: Slot) -> tuple[int, object]:
        tensor = self._held[slot.offset or 0]
        return tensor.data_ptr(), tensor


def as_stored(call: Call, tensors: Mapping[str, torch.Tensor], rank: int, folder: Path) -> StoredCall:
    """The call as if it were read from a run, with the values of these tensors."""
    values = HeldValues(tensors)
    model = msgspec.structs.replace(call, slots=tuple(map(values.give, call.slots)))
    return StoredCall(model, step=0, rank=rank, index=0, run=folder, source=values)


def with_outputs(forward: Call, backward: Call) -> Call:
    """A forward call with its outputs, of which no more is known than that their gradients are like them."""
    outputs = [
        Slot(f"output{slot.name[5:]}", slot.dtype, slot.shape) for slot in backward.slots if slot.side == "input"
    ]
    return msgspec.structs.replace(forward, slots=(*forward.slots, *outputs))


def write_overflow(rank_folder: Path, count: int, call: StoredCall, frames: Sequence[Frame], everything: bool) -> Path:
    """Write the pkl of the `count`-th overflow and its folder; the path of the pkl. `everything`: as with the filter off."""
    folder = acl.new_folder(lambda moment: rank_folder / f"Overflow_info_{moment:%Y%m%d_%H%M%S}_{count}")
    stack = [[frame.file, str(frame.line), frame.function, frame.code] for frame in frames]
    lines: list[Any] = [[stack_line_name(call.name), stack]]
    taken: dict[str, int] = {}
    for name, dtype, shape, array in _arrays(call, everything):
        file = safe_file_name(name, "", taken)
        numpy.save(folder / f"{file}.npy", array, allow_pickle=False)
        lines.append([file, STEP, [], dtype, shape])
    pkl = folder.with_name(f"{folder.name}.pkl")
    replace_file(pkl, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return pkl


def _arrays(call: StoredCall, everything: bool) -> Iterator[tuple[str, str, Any, Any]]:
    """Name, dtype, shape and values of each tensor, and with `everything` of each number among the arguments."""
    single = len([slot for slot in call.outputs if not slot.name.startswith("output.changed")]) == 1
    for slot in call.slots:
        kind = DTYPES[slot.dtype].kind if slot.dtype in DTYPES else ""
        if slot.has_data and (everything or kind in ("float", "complex")):
            name = write_line_name(call.name, slot.name, single=single)
            yield name, f"torch.{slot.dtype}", list(slot.shape), slot.numpy()
    for place, value in numbers_in(call.args, call.kwargs) if everything else ():
        yield write_line_name(call.name, place, single=False), str(type(value)), "[]", numpy.array(value)


def missing(call: StoredCall) -> list[str]:
    """The tensors whose values were not there any more when the overflow was found."""
    return [slot.name for slot in call.slots if not slot.has_data]

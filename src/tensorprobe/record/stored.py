"""A call and its slots, as read from a run: their description, position and values.

The fields of `model.Call` and `model.Slot` are attributes here; `call.model` and `slot.model` are those structs.
Values are read when `tensor()`, `numpy()` or `buffer()` is called, and never before.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tensorprobe.errors import NoData, RunDamaged, TensorDamaged
from tensorprobe.model import ArgumentTree, Call, Direction, Level, Side, Slot, Summary
from tensorprobe.record.blob import ByteSource
from tensorprobe.record.elements import stored_elements, to_numpy, to_torch
from tensorprobe.record.lines import MAX_NESTING, nesting_exceeds

if TYPE_CHECKING:
    import numpy
    import torch

T = TypeVar("T")


def _of_model(name: str) -> Any:
    """Return a property that gives a field of the model through."""
    return property(attrgetter(f"model.{name}"))


class StoredCall:
    """One call of a run. `index` is its zero-based line in its step and rank."""

    __slots__ = ("_run", "_source", "index", "model", "rank", "step")

    def __init__(self, model: Call, *, step: int, rank: int, index: int, run: Path, source: ByteSource) -> None:
        self.model = model
        self.step = step
        self.rank = rank
        self.index = index
        self._run = run
        self._source = source

    def __repr__(self) -> str:
        return f"<call {self.index} of step {self.step}, rank {self.rank}: {self.name}>"

    name: str = _of_model("name")
    op: str = _of_model("op")
    number: int = _of_model("number")
    direction: Direction = _of_model("direction")
    level: Level = _of_model("level")
    module: str = _of_model("module")
    parent: str | None = _of_model("parent")
    origin: str | None = _of_model("origin")
    stack: int | None = _of_model("stack")
    """The id of the stack; `run.stack(call)` gives the stack."""
    thread: int = _of_model("thread")
    repeat: int = _of_model("repeat")
    raised: str | None = _of_model("raised")

    @property
    def args(self) -> ArgumentTree:
        return self._arguments(self.model.args)

    @property
    def kwargs(self) -> ArgumentTree:
        return self._arguments(self.model.kwargs)

    phase: str = _of_model("phase")
    microbatch: int | None = _of_model("microbatch")

    @property
    def slots(self) -> tuple[StoredSlot, ...]:
        return tuple(StoredSlot(slot, self) for slot in self.model.slots)

    @property
    def inputs(self) -> tuple[StoredSlot, ...]:
        return self._side("input")

    @property
    def outputs(self) -> tuple[StoredSlot, ...]:
        return self._side("output")

    @property
    def parameters(self) -> tuple[StoredSlot, ...]:
        return self._side("parameters")

    def _side(self, side: Side) -> tuple[StoredSlot, ...]:
        return tuple(StoredSlot(slot, self) for slot in self.model.slots if slot.side == side)

    def _arguments(self, tree: ArgumentTree) -> ArgumentTree:
        if nesting_exceeds(tree, MAX_NESTING):
            raise RunDamaged(
                f"the arguments of {self.name} (call {self.index}, rank {self.rank}, step {self.step}) "
                f"in '{self._run}' are nested more than {MAX_NESTING} deep. Its tensors can still be read."
            )
        return tree


class StoredSlot:
    """The place of one tensor in a stored call."""

    __slots__ = ("call", "model")

    def __init__(self, model: Slot, call: StoredCall) -> None:
        self.model = model
        self.call = call

    def __repr__(self) -> str:
        return f"<{self.name} of {self.call.name}: {self.dtype} {list(self.shape)}>"

    name: str = _of_model("name")
    dtype: str = _of_model("dtype")
    shape: tuple[int, ...] = _of_model("shape")
    device: str = _of_model("device")
    stride: tuple[int, ...] | None = _of_model("stride")
    grad: bool = _of_model("grad")
    summary: Summary | None = _of_model("summary")
    digest: str | None = _of_model("digest")
    role: str = _of_model("role")
    offset: int | None = _of_model("offset")
    nbytes: int = _of_model("nbytes")
    skipped: str | None = _of_model("skipped")
    written: tuple[tuple[int, int], ...] | None = _of_model("written")
    """Where elements were written, if the memory was not initialised and is written in part; the others are zero here."""
    side: Side = _of_model("side")
    count: int = _of_model("count")
    has_data: bool = _of_model("has_data")

    def tensor(self) -> torch.Tensor:
        """Return the values as a CPU tensor on the memory of the file; nothing is copied until you write to it.

        Clone it before writing: slots with equal values share their memory. NoData when only a summary was recorded,
        TensorDamaged when the bytes are not sound.
        """
        return self._read(lambda: to_torch(self._bytes(), self.model))

    def stored(self) -> numpy.ndarray[Any, Any]:
        """Return the elements as they are stored, on the memory of the file. `elements.widen` makes numbers of a part of them.

        Raises as `tensor` does.
        """
        return self._read(lambda: stored_elements(self._bytes(), self.model))

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """Return the values as a numpy array; bfloat16 and float8 become float32, complex32 becomes complex64. Raises as `tensor` does."""
        return self._read(lambda: to_numpy(self._bytes(), self.model))

    def buffer(self) -> memoryview:
        """Return the stored bytes, little-endian. Raises as `tensor` does."""
        return self._read(self._bytes)

    def _bytes(self) -> memoryview:
        return self.call._source.read(self.model)

    def _read(self, read: Callable[[], T]) -> T:
        if not self.has_data:
            why = f"it was skipped: {self.skipped}" if self.skipped else "only its description was recorded"
            raise NoData(
                f"no values of {self._place()}; {why}.\n  Capture with mode='tensor', and a large enough max_bytes, to record them."
            )
        try:
            return read()
        except TensorDamaged as fact:
            raise TensorDamaged(
                f"{self._place()}: {fact}.\n  Other tensors may be sound: tensorprobe inspect {self.call._run} --verify"
            ) from None

    def _place(self) -> str:
        call = self.call
        return f"{self.name} of {call.name} (call {call.index}, rank {call.rank}, step {call.step}) in '{call._run}'"

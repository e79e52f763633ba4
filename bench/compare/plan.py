"""Which calls and tensors the dumps of the compare benchmark hold: the ops of transformer layers, as plain data.

A layer is ten forward calls and their ten backward ones; its shapes follow from batch, sequence and width. Nothing is
computed: the values come later, as noise (data.py), and no two tensors share their bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
ITEMSIZE = {"float32": 4, "bfloat16": 2}
HEADS = 4
VARIANTS = ("noisy", "cold", "identical", "proved")
"""See the docstring of `bench.compare`."""


@dataclass(frozen=True)
class Size:
    """One size of the benchmark. `layers`: dtype → how many layers of it."""

    name: str
    layers: dict[str, int]
    batch: int
    sequence: int
    width: int
    affine: bool = True
    """Whether linear and layer_norm have bias and weight vectors."""
    values: bool = True
    """Whether the tensors themselves are stored, or their statistics only."""
    peer: bool = True
    """Whether the peer is given it: it takes minutes for 100,000 rows, so it has a part of them as a size of its own."""
    variants: tuple[str, ...] = VARIANTS
    """Those that tell something of this size."""


_TINY = Size("small", {"float32": 1800}, batch=1, sequence=8, width=16, affine=False, peer=False)
_STATISTICS = Size("summary", {"float32": 5000}, batch=4, sequence=512, width=1024, values=False, peer=False)
SIZES = {
    size.name: size
    for size in (
        Size("large", {"float32": 2, "bfloat16": 1}, batch=4, sequence=480, width=1024),
        Size("middle", {"float32": 3, "bfloat16": 2}, batch=4, sequence=128, width=256),
        replace(_TINY, variants=("noisy", "identical", "proved")),
        replace(_TINY, name="small-part", layers={"float32": 50}, peer=True, variants=("noisy",)),
        replace(_STATISTICS, variants=("noisy", "identical")),
        replace(_STATISTICS, name="summary-part", layers={"float32": 14}, peer=True, variants=("noisy",)),
    )
}


@dataclass(frozen=True)
class PlannedSlot:
    """One tensor to be made."""

    name: str
    dtype: str
    shape: Shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class PlannedCall:
    """One call to be made. `arguments` of a forward call: a slot, a plain value, or a list of values."""

    name: str
    module: str
    arguments: list[Any]
    inputs: list[PlannedSlot]
    outputs: list[PlannedSlot]

    @property
    def slots(self) -> list[PlannedSlot]:
        """Inputs first, as in a record."""
        return [*self.inputs, *self.outputs]


def list_calls(size: Size) -> list[PlannedCall]:
    """All forward calls, then the backward ones in reverse order."""
    dtypes = itertools.chain.from_iterable([dtype] * count for dtype, count in size.layers.items())
    numbers: dict[str, int] = {}
    forward = []
    for layer, dtype in enumerate(dtypes):
        for op, module, arguments, output in _layer(size):
            number = numbers.get(op, 0)
            numbers[op] = number + 1
            forward.append(_forward(f"{op}.{number}.forward", f"layers.{layer}.{module}", dtype, arguments, output))
    return forward + [_backward(call) for call in reversed(forward)]


def planted_call(calls: list[PlannedCall]) -> str:
    """The call whose output is wrong in the candidate: a float32 linear, two thirds into those of the forward."""
    fit = [call.name for call in calls if _may_be_planted(call)]
    return fit[len(fit) * 2 // 3]


def _may_be_planted(call: PlannedCall) -> bool:
    is_linear = call.name.startswith("Functional.linear.") and call.name.endswith(".forward")
    return is_linear and call.outputs[0].dtype == "float32"


def _layer(size: Size) -> Iterator[tuple[str, str, list[Any], Shape]]:
    """(op, module, arguments, shape of the output); an argument that is a tuple is a tensor of that shape."""
    width = size.width
    rows = (size.batch, size.sequence)
    hidden, wide = (*rows, width), (*rows, 4 * width)
    heads = (size.batch, HEADS, size.sequence, width // HEADS)

    def linear(module: str, taken: Shape, given: int) -> tuple[str, str, list[Any], Shape]:
        bias = [(given,)] if size.affine else []
        return "Functional.linear", module, [taken, (given, taken[-1]), *bias], (*rows, given)

    norm = [hidden, [width], *([(width,), (width,)] if size.affine else [None, None]), 1e-5]
    yield "Functional.layer_norm", "norm_1", norm, hidden
    yield linear("attention.qkv", hidden, 3 * width)
    yield "Functional.scaled_dot_product_attention", "attention", [heads, heads, heads], heads
    yield linear("attention.projection", hidden, width)
    yield "Tensor.add", "", [hidden, hidden], hidden
    yield "Functional.layer_norm", "norm_2", norm, hidden
    yield linear("mlp.up", hidden, 4 * width)
    yield "Functional.gelu", "mlp", [wide], wide
    yield linear("mlp.down", wide, width)
    yield "Tensor.add", "", [hidden, hidden], hidden


def _forward(name: str, module: str, dtype: str, arguments: list[Any], output: Shape) -> PlannedCall:
    filled = [
        PlannedSlot(f"input.{place}", dtype, argument) if isinstance(argument, tuple) else argument
        for place, argument in enumerate(arguments)
    ]
    inputs = [argument for argument in filled if isinstance(argument, PlannedSlot)]
    return PlannedCall(name, module.rstrip("."), filled, inputs, [PlannedSlot("output.0", dtype, output)])


def _backward(call: PlannedCall) -> PlannedCall:
    """Takes a gradient of each output, gives one of each input."""
    name = call.name.removesuffix("forward") + "backward"
    taken = [PlannedSlot(slot.name.replace("output", "input"), slot.dtype, slot.shape) for slot in call.outputs]
    given = [PlannedSlot(f"output.{place}", slot.dtype, slot.shape) for place, slot in enumerate(call.inputs)]
    return PlannedCall(name, call.module, [], taken, given)


@dataclass(frozen=True)
class Dumps:
    """What is made, and where. `nbytes` of one side, 0 when it has statistics only."""

    folder: Path
    planted: str
    calls: int
    slots: int
    nbytes: int

    def ours(self, side: str) -> Path:
        """The run folder of `baseline`, `candidate` or `same`."""
        return self.folder / "ours" / side

    def peer(self, side: str) -> Path:
        """The peer's folder of `baseline` or `candidate`."""
        return self.folder / "peer" / side / "step0" / "rank0"


def describe_dumps(size: Size, work: Path) -> Dumps:
    """The dumps of a size, whether they are there yet or not."""
    calls = list_calls(size)
    slots = [slot for call in calls for slot in call.slots]
    nbytes = sum(slot.nbytes for slot in slots) if size.values else 0
    return Dumps(work / f"tensorprobe-compare-{size.name}", planted_call(calls), len(calls), len(slots), nbytes)

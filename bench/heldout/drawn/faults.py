"""Faults of the drawn part: wrong kernels, drawn at random among those that a family runs.

`TENSORPROBE_DRAW=7` draws others: a number that nobody has looked at is a part that nobody has tuned on.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.heldout import kinds, record
from bench.heldout.cases import Fault, Setting
from bench.heldout.device import Layer
from bench.heldout.drawn.families import FAMILIES
from bench.heldout.plant import kernel
from bench.heldout.training import Entry, Setup

SEED = int(os.environ.get("TENSORPROBE_DRAW", "1"))
EACH = 8
"""Faults for each family and precision."""

KINDS: dict[str, Callable[[random.Random, float], Layer]] = {
    "value": lambda draw, unit: kinds.scaled(1 + draw.choice((-1, 1)) * unit * draw.choice((1, 3, 10))),
    "shift": lambda draw, unit: kinds.shifted(unit * draw.choice((2, 10))),
    "noise": lambda draw, unit: kinds.noisy(unit * draw.choice((3, 10))),
    "element": lambda draw, unit: kinds.one_element(max(0.05, 20 * unit) * draw.choice((1, 4)), draw.random()),
    "tile": lambda draw, unit: kinds.one_tile(1 + 10 * unit * draw.choice((-1, 1))),
    "part": lambda draw, unit: kinds.last_columns(draw.choice((0.0, 0.9))),
    "row": lambda draw, unit: kinds.first_row(draw.choice((0.0, 0.9))),
    "moved": lambda draw, unit: kinds.rolled(1, draw.choice((0, -1))),
    "saturated": lambda draw, unit: kinds.saturated(draw.choice((1.0, 1.5))),
    "flushed": lambda draw, unit: kinds.flushed(draw.choice((0.05, 0.2))),
    "precision": lambda draw, unit: kinds.rounded(torch.bfloat16 if unit < 0.01 else torch.float8_e5m2),
    "stale": lambda draw, unit: kinds.stale(),
}
"""By name: the layer of a fault, from the least relative error that is well above rounding."""
_UNITS = {"fp32": 1e-3}
_PLAIN = """view _unsafe_view t transpose expand permute slice select unsqueeze squeeze detach alias as_strided split chunk clone copy_
_to_copy empty empty_like zeros zeros_like ones ones_like full full_like fill_ zero_ arange new_zeros new_empty lift_fresh
scalar_tensor is_same_size unbind stack item _local_scalar_dense""".split()
"""No arithmetic, or nothing that a fault could be planted into."""


@dataclass(frozen=True)
class Drawn(Fault):
    """Measured at one level on the same device, and at two across."""

    def settings(self) -> list[Setting]:
        draw = random.Random(f"{SEED} {self.name}")
        levels = ["api", "mix", "aten"]
        return [Setting("cpu", "cpu", level=draw.choice(levels))] + [
            Setting("cpu", "second", level=each) for each in draw.sample(levels, 2)
        ]


class _Count(TorchDispatchMode):
    """The kernels with a floating-point result, by name and direction."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        packet, overload = func.__name__.split(".") if "." in func.__name__ else (func.__name__, "default")
        wanted = isinstance(first, torch.Tensor) and first.is_floating_point() and first.numel() > 3 and first.dim()
        way = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        summed = packet == "add" and way == "backward"  # autograd adds up gradients in another way under a mode
        if (
            wanted
            and not summed
            and packet not in _PLAIN
            and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
        ):
            self.seen[f"{way} {packet if overload == 'default' else func.__name__}"] += 1
        return result


def _kernels(entry: Entry, precision: str) -> dict[str, int]:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    training = entry.build(Setup("cpu", precision))
    with _Count() as count:
        training.step(0)
    return dict(sorted(count.seen.items()))


def draw_faults() -> list[Fault]:
    made: list[Fault] = []
    for name, entry in FAMILIES.items():
        for precision in entry.precisions.split():
            seen = record.in_child(_kernels, entry, precision)
            draw = random.Random(f"{SEED} {name} {precision}")
            for each in draw.sample(sorted(seen), min(EACH, len(seen))):
                way, op = each.split(" ")
                kind, nth = draw.choice(sorted(KINDS)), draw.randrange(seen[each])
                wrong = KINDS[kind](draw, _UNITS.get(precision, 0.03))
                about = f"{kind} of {way} {op} {nth}"
                made.append(Drawn(name, kind, about, kernel(op, wrong, nth, way), precision))
    return made


FAULTS = draw_faults()

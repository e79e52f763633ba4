"""The names and defaults of the arguments of torch's functions, from a table that tools/make_signatures.py writes.

A function of `torch.nn.functional` has a line of its own; methods of tensors and functions of `torch` share theirs. ATen ops get
all their arguments by position and need none.
"""

from __future__ import annotations

from ast import literal_eval
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class Signature(NamedTuple):
    """The names of the arguments by position, empty where they depend on the overload; and the defaults, by name."""

    names: tuple[str, ...]
    defaults: dict[str, Any]


_UNKNOWN = Signature((), {})
_STATE = ("weight", "bias", "running_mean", "running_var")


@cache
def _table() -> dict[str, str]:
    text = Path(__file__).with_name("signatures.txt").read_text(encoding="utf-8")
    return {name: rest for name, _, rest in (line.partition(" ") for line in text.splitlines())}


@cache
def signature_of(op: str) -> Signature:
    """Return what is known of the arguments of an op: `Functional.gelu`, `Torch.add`, `Tensor.sum`."""
    family, _, name = op.partition(".")
    table = _table()
    line = table.get(f"Functional.{name}")
    if family != "Functional" and name in table:
        line = table[name]
    if line is None or family == "Aten":
        return _UNKNOWN
    positional, _, named = line.partition(" * ")
    words = positional.split()
    given = (word.partition("=") for word in (*words, *named.split()))
    return Signature(
        tuple(word.partition("=")[0].removeprefix("?") for word in words),
        {key: literal_eval(value) for key, sign, value in given if sign},
    )


def parameter_names(op: str) -> tuple[str, ...]:
    """Return the names of the op's arguments by position, the first one empty; () when they are not known."""
    names = signature_of(op).names
    return ("", *names[1:]) if names else ()


@lru_cache(maxsize=1 << 14)
def argument_name(op: str, slot: str) -> str:
    """Return `weight` for `input.1` of a linear op; empty when nothing is known of the slot."""
    for side in ("parameters.", "input.kwargs."):
        if slot.startswith(side):
            return slot.removeprefix(side)
    names, position = parameter_names(f"Functional.{op.rpartition('.')[2]}"), slot.removeprefix("input.")
    name = names[int(position)] if position.isdecimal() and int(position) < len(names) else ""
    return name if name in _STATE else ""


def positional_slot(op: str, slot: str) -> str:
    """Return the slot of a tensor, or of its gradient, as it is when the tensor is passed by position.

    Unknown slots stay as they are.
    """
    side, _, name = slot.partition(".kwargs.")
    names = parameter_names(op)
    return f"{side}.{names.index(name)}" if name and name in names else slot

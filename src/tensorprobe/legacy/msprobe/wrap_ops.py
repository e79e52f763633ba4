"""Which APIs a support_wrap_ops.yaml leaves out.

In: that file, ours or one that was edited for msprobe. Out: names of ops as capture gives them. Capture needs no list, so
what is not listed is recorded all the same: only a line that is commented out leaves its API out, and a line that is there
brings it back. The form is flat (groups, items, comments); anything else is an error with its line. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import read_file
from tensorprobe.legacy import msprobe
from tensorprobe.ops.names import canonical_op
from tensorprobe.text import plain

GROUPS = {
    "functional": "Functional",
    "tensor": "Tensor",
    "torch": "Torch",
    "_VF": "VF",
    "torch_npu": "NPU",
    "distributed": "Distributed",
    "aten": "Aten",
    "npu_distributed": "Distributed",
    "mindspeed": "MindSpeed",
}
"""Group of the file → what the names of its ops begin with. The last two stand in files of msprobe itself."""

_GROUP = re.compile(r"(\w+)\s*:\s*(?:\[\s*\]\s*)?(?:#.*)?")
_ITEM = re.compile(r"""\s*(?P<off>#?)\s*-\s+(?P<quote>["']?)(?P<name>[A-Za-z_][\w.]*)(?P=quote)\s*(?:#.*)?""", re.ASCII)
_KNOWN = {group.lower(): family for group, family in GROUPS.items()}


class Item(NamedTuple):
    """One API of the file; `listed` is False where its line is commented out."""

    op: str
    listed: bool


def excluded_ops(path: str | os.PathLike[str] | None = None) -> frozenset[str]:
    """The ops that a file leaves out, `Functional.gelu`; without a path those that ours does, which is none as it ships.

    Operators stand there by every name they have: `__add__` leaves out `Tensor.add`, which is how capture meets `x + y`.
    An ATen op stands there without its overload: `Aten.mm` is all of `Aten.mm.default`, `Aten.mm.out`.
    """
    file = msprobe.LIST_OF_APIS if path is None else Path(path)
    items = [] if file is None else list(read_items(file))
    off = {item.op for item in items if not item.listed} - {item.op for item in items if item.listed}
    return frozenset(off | {canonical_op(op) for op in off})


def read_items(path: Path) -> Iterator[Item]:
    """Every API of the file, in its order; SettingsError for a line that is not of its form."""
    family = ""
    for number, line in enumerate(_read_lines(path), start=1):
        if match := _ITEM.fullmatch(line):
            if not match["off"] and not family:
                raise SettingsError(f"'{plain(path)}', line {number}: {plain(line.strip())!r} stands in no group.")
            if family:
                yield Item(f"{family}.{match['name']}", listed=not match["off"])
        elif match := _GROUP.fullmatch(line):
            family = _family(match[1], path, number)
        elif line.strip() and not line.lstrip().startswith("#"):
            raise SettingsError(
                f"'{plain(path)}', line {number}: {plain(line.strip())!r} is neither a group ('tensor:') nor an API ('  - add')."
            )


def _read_lines(path: Path) -> list[str]:
    try:
        return read_file(path).decode("utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"'{plain(path)}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"'{plain(path)}' is no text: {error}.") from None


def _family(group: str, path: Path, number: int) -> str:
    if group.lower() not in _KNOWN:
        raise SettingsError(
            f"'{plain(path)}', line {number}: there is no group {group!r}.{did_you_mean(group, GROUPS)}\n"
            f"  There are {', '.join(GROUPS)}."
        )
    return _KNOWN[group.lower()]

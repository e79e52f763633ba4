"""The cards of the simulated device, `npu:0` to `npu:15`: which one is current, for each thread.

Tensors carry the number of their card, and memory is shared by all of them. torch's own guard in Python says that there is one
card, so its autograd engine has a thread for one only. `install` therefore gives the guard a copy of its table of virtual
functions with five entries from `_cards.c`, and puts the old table back if torch does not use them. The order of the table
is in the header that torch ships. If `_cards.c` is not built, or the table differs, there is one card.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

_HEADER = "include/c10/core/impl/DeviceGuardImplInterface.h"
_FUNCTIONS = {
    "exchangeDevice": "exchange",
    "getDevice": "get",
    "setDevice": "set",
    "uncheckedSetDevice": "set",
    "deviceCount": "count",
}
"""Virtual function of a guard → the function of `_cards.c`."""
_BEFORE, _SIZE = 2, 64
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_tables: list[Any] = []  # torch keeps an address of it
_native: Any = None


def install(guard: Any) -> None:
    """Make torch ask `_cards.c` for the current card and for the number of cards."""
    global _native
    try:
        native = import_module("tensorprobe.sim._cards")
        header = Path(torch.__file__).parent.joinpath(_HEADER).read_text(encoding="utf-8")
    except (ImportError, OSError):
        return
    order = re.findall(r"^  virtual [^(~]*?(\w+)\(", header, re.MULTILINE)
    if not {*_FUNCTIONS} <= {*order}:
        return
    instance = ctypes.c_void_p.from_address(id(guard) + object.__basicsize__).value
    if instance is None:
        return
    place = ctypes.c_void_p.from_address(instance)
    shipped = place.value or 0
    table_type = ctypes.c_void_p * _SIZE
    table = table_type(*table_type.from_address(shipped - _BEFORE * _POINTER))
    for function, name in _FUNCTIONS.items():
        table[_BEFORE + order.index(function)] = native.addresses()[name]
    _tables.append(table)
    place.value = ctypes.addressof(table) + _BEFORE * _POINTER
    torch.accelerator.set_device_index(native.CARDS - 1)
    if native.exchange(0) == native.CARDS - 1 and torch.accelerator.current_device_index() == 0:
        _native = native
    else:
        place.value = shipped


def count() -> int:
    """Return how many cards there are."""
    return 1 if _native is None else int(_native.CARDS)


def missing(device: str) -> str:
    """Return the message about a card that does not exist."""
    kind = device.partition(":")[0]
    if _native is None:
        return (
            f"no device {device!r}: the simulated accelerator has one device here, '{kind}:0'; its C part is not built"
        )
    return (
        f"no device {device!r}: the simulated accelerator has {count()} devices, '{kind}:0' to '{kind}:{count() - 1}'"
    )


def visible() -> int:
    """Return how many cards the program sees: as many as its environment names, and at least the current one."""
    named = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    told = len(named.split(",")) if named else int(processes) if processes.isdigit() else 1
    return max(min(told, count()), current() + 1)


def current() -> int:
    """Return the current card of this thread."""
    return exchange(-1)


def exchange(index: int) -> int:
    """Make this the current card of the thread and return the one before; -1 changes nothing."""
    return 0 if _native is None else int(_native.exchange(index))


@contextmanager
def on(index: int) -> Iterator[None]:
    """Make this the current card inside the `with`."""
    before = exchange(index)
    try:
        yield
    finally:
        exchange(before)

"""A simulated accelerator with faults on demand.

    from tensorprobe import sim
    sim.enable()                                    # torch.device("npu") now exists and computes on the host
    with sim.fault("aten::_softmax", "tail", block=8):
        train("npu")                                # the last 8 columns of every softmax are wrong

Importing this package imports no torch. See docs/sim.md for the kinds of faults, the catalog and what the device
cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorprobe.sim.faults import (
    Fault,
    Installed,
    active,
    install,
    installed,
    make_fault,
    read_faults,
    silent,
    write_faults,
)

if TYPE_CHECKING:
    from tensorprobe.sim.known_faults import CatalogFault

__all__ = [
    "Fault",
    "Installed",
    "active",
    "catalog",
    "enable",
    "enabled",
    "fault",
    "install",
    "installed",
    "make_fault",
    "read_faults",
    "silent",
    "write_faults",
]


@dataclass
class _State:
    """The state of the device in this process. `name` is the device type, None until `enable`."""

    name: str | None = None


STATE = _State()


def enable(name: str = "npu", *, torch_npu: bool = False) -> None:
    """Register the device `name` in this process. It cannot be removed. `torch_npu` adds a stand-in module of that name.

    Faults in the environment variable TENSORPROBE_SIM_FAULTS (names of the catalog, a file, or JSON) are installed at
    the first call. Raises `UnsupportedTorch` if torch lacks what is needed, and `SettingsError` if the name
    cannot be used.
    """
    import os

    from tensorprobe.sim import device

    first = STATE.name is None
    device.enable(name)
    if torch_npu:
        from tensorprobe.sim import npu_module

        npu_module.install(name)
    text = os.environ.get("TENSORPROBE_SIM_FAULTS", "")
    if first and text:
        for one in read_faults(text):
            install(one)


def enabled() -> str | None:
    """Return the name of the simulated device, or None before `enable`."""
    return STATE.name


@contextmanager
def fault(op: str, kind: str, **settings: Any) -> Iterator[Installed]:
    """Install a fault on `op` inside the `with`, and yield its handle with the counts.

    The keywords are fields of `Fault` and parameters of the kind.
    """
    handle = install(make_fault(op=op, kind=kind, **settings))
    try:
        yield handle
    finally:
        handle.remove()


def catalog() -> list[CatalogFault]:
    """Return the named faults, each with the model that shows it, its op, and the first call that diverges."""
    from tensorprobe.sim.known_faults import joined

    return joined()

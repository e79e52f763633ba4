"""What the process knows of its simulated device. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class State:
    """`name` is the device type, None until `enable`."""

    name: str | None = None


STATE = State()

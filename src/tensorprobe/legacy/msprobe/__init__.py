"""What msprobe does: its debugger, its comparison, its commands. The package of that name holds no more than names."""

from __future__ import annotations

from pathlib import Path

from tensorprobe.legacy.speaking import logger_of, say_if_published

logger, speak = logger_of("msprobe")
LIST_OF_APIS: Path | None = None
"""The `support_wrap_ops.yaml` that users of msprobe edit, where it is installed."""


def take_over(list_of_apis: Path) -> None:
    """Called when the package `msprobe` is imported: remember its list of APIs, and warn of a published msprobe."""
    global LIST_OF_APIS
    LIST_OF_APIS = list_of_apis
    say_if_published("msprobe", "mindstudio-probe")

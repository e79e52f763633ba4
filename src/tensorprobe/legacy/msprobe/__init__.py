"""What msprobe does: its debugger, its comparison, its commands. The package of that name holds no more than names."""

from __future__ import annotations

from pathlib import Path

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.speaking import logger_of, say_if_published

logger, speak = logger_of("msprobe")
LIST_OF_APIS: Path | None = None
"""The `support_wrap_ops.yaml` that users of msprobe edit, where it is installed."""


def take_over(list_of_apis: Path) -> None:
    """Called when the package `msprobe` is imported: remember its list of APIs, and warn of a published msprobe."""
    global LIST_OF_APIS
    LIST_OF_APIS = list_of_apis
    say_if_published("msprobe", "mindstudio-probe")


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed python, numpy and torch; `mode=True` also turns deterministic algorithms on. SettingsError for `rm_dropout=True`."""
    from tensorprobe.taps import seed_all as seed_everything  # which imports torch

    if rm_dropout is not False:
        raise SettingsError(
            f"seed_all: rm_dropout is {rm_dropout!r}; dropout is not taken out of a model here.\n"
            "  It is the same in every run with the same seed; to do without it, build the model with p=0."
        )
    seed_everything(seed, mode)

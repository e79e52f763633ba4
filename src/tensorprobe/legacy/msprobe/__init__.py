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
    """Seed python, numpy and torch; `mode=True` also turns deterministic algorithms on.

    `rm_dropout=True` gives every later call of `F.dropout`, `F.dropout2d` and `F.dropout3d`, and of the modules that call
    them, the probability 0 for the rest of the process. Other kinds of dropout stay as they are.
    """
    from tensorprobe.taps.seed import remove_dropout  # which imports torch
    from tensorprobe.taps.seed import seed_all as seed_everything

    if not isinstance(rm_dropout, bool):
        raise SettingsError(f"rm_dropout is {rm_dropout!r}; it must be True or False.")
    seed_everything(seed, mode)
    if rm_dropout:
        remove_dropout()
        speak()
        logger.info("seed_all(rm_dropout=True): F.dropout, F.dropout2d and F.dropout3d have p=0 from here on.")

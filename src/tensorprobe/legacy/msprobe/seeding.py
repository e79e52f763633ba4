"""`seed_all` with msprobe's parameters."""

from __future__ import annotations

from tensorprobe.errors import SettingsError
from tensorprobe.taps import seed_all as seed_everything


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed python, numpy and torch; `mode=True` also turns deterministic algorithms on. SettingsError for `rm_dropout=True`."""
    if rm_dropout is not False:
        raise SettingsError(
            f"seed_all: rm_dropout is {rm_dropout!r}; dropout is not taken out of a model here.\n"
            "  It is the same in every run with the same seed; to do without it, build the model with p=0."
        )
    seed_everything(seed, mode)

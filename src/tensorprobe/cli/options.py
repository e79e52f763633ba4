"""Options that several commands share, and options made from a room's table of settings.

An option that means the same has the same name in every command. Spellings of earlier versions still work, and are hidden.
"""

from __future__ import annotations

from typing import Any

import typer

from tensorprobe.settings import Settings


def option(table: type[Settings], name: str, *flags: str, **extra: Any) -> Any:
    """Return the option for a setting: its default and its help are those of the table."""
    declared = table.declared()[name]
    return typer.Option(extra.pop("default", declared.default), *flags, help=declared.help, **extra)

"""A `Page` as one HTML file that needs no network: the built template with the data in it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from tensorprobe.report.page.data import Page
from tensorprobe.standard_json import encode
from tensorprobe.text import printable

TEMPLATE = "template.html"
_SLOT = "{}"
_OPENING = '<script type="application/json" id="data">'
_OFFLINE = "connect-src 'none'"


@cache
def template() -> str:
    """Return the built page without data."""
    return files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")


def to_html(page: Page, *, server: bool = False) -> str:
    """Return the file. With `server`, the page may ask the server that it came from, and nobody else."""
    data = encode(_harmless({**msgspec.to_builtins(page), "server": server}))
    # `<` never stands in the data as it is: nothing in it can end the element, or begin a comment that hides its end.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    head, opening, tail = template().partition(_OPENING + _SLOT)
    held = f"{head}{_OPENING}{data}{tail}" if opening else ""
    return held.replace(_OFFLINE, "connect-src 'self'", 1) if server else held


def _harmless(held: Any) -> Any:
    """Return the data with control characters, and marks that reorder text, as escapes in every text."""
    if isinstance(held, str):
        return held if held.isprintable() else printable(held.expandtabs(4))
    if isinstance(held, dict):
        return {key: _harmless(value) for key, value in held.items()}
    return [_harmless(each) for each in held] if isinstance(held, (list, tuple)) else held

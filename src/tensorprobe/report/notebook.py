"""Results in a notebook: a card with the answer, and the page in a frame. Everything foreign is escaped."""

from __future__ import annotations

from html import escape

_COLOURS = {0: "#1a7f37", 1: "#cf222e", 2: "#9a6700"}
_CARD = "border-left:4px solid {colour};padding:.3em .9em;margin:.4em 0;overflow-x:auto"


class Frame:
    """A page as an object that a notebook shows."""

    def __init__(self, page: str, height: int) -> None:
        self._page, self._height = page, height

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self._page)}" style="width:100%;height:{self._height}px;border:0"></iframe>'


class Text(str):
    """The text of an answer, which a notebook shows as a card, and a shell as its lines."""

    exit_code: int

    @classmethod
    def of(cls, text: str, exit_code: int) -> Text:
        """Return a text with the exit code that gives its card the colour."""
        made = cls(text)
        made.exit_code = exit_code
        return made

    def _repr_html_(self) -> str:
        return card(self, self.exit_code)


def card(text: str, exit_code: int) -> str:
    """Return the text of an answer as HTML: its first line large, in the colour of the exit code."""
    first, _, rest = text.strip("\n").partition("\n")
    word, _, told = first.partition("  ")
    colour = _COLOURS.get(exit_code, _COLOURS[2])
    return (
        f'<div style="{_CARD.format(colour=colour)}"><p style="margin:.2em 0"><b style="color:{colour};font-size:1.2em">'
        f'{escape(word)}</b> {escape(told.strip())}</p><pre style="margin:0;font-size:.85em">{escape(rest)}</pre></div>'
    )

"""Words and numbers as every form of output writes them, and foreign text made harmless, once for each form.

Foreign text is whatever comes from a file or a program that is not ours: names, paths, error messages. Before it is
written it goes through the function of its form: `plain` (one line on a terminal), `message` (an error of several lines),
`sheet_text` (CSV, XLSX), `code` (Markdown), `xml` (JUnit) or `annotation` (GitHub). No function here raises.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_MAX_TEXT = 300
_MAX_WORD = 4096
"""A path may be as long as this."""
_MOST_BYTES = 10**30
"""More is not told apart: a file may say any number."""
_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")
FORMULA = "'*[=+\\-@\uff1d\uff0b\uff0d\uff20]"
"""The start of a text that a spreadsheet may run, full-width signs included; leading apostrophes make `sheet_text` reversible."""
_FORMULA = re.compile(FORMULA)
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_CONTINUES = "\n  "
"""How a further line of our own messages begins. A newline inside a foreign name is not followed by this."""


def counted(count: int, noun: str) -> str:
    """Return `1 call` or `1,204 calls`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Return `0-3, 7` for the sorted numbers 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def size(count: int) -> str:
    """Return `1.8 GB` for a number of bytes."""
    value, unit = float(max(-_MOST_BYTES, min(count, _MOST_BYTES))), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count:,} bytes" if not unit else f"{value:.3g} {_UNITS[unit]}"


def printable(text: str) -> str:
    """Return the text on one line. Control characters and marks that reorder text become escapes: `\\n`, `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def harmless_lines(text: str) -> str:
    """Return the text with its lines, without anything else that a terminal acts on."""
    if not _ACTS.search(text):
        return text
    return "\n".join(printable(line.replace("\t", " ")) for line in text.split("\n"))


def plain(text: object) -> str:
    """Return the text for a terminal: on one line, without control characters, cut after 300 characters."""
    return _cut(str(text), _MAX_TEXT)


def message(text: object) -> str:
    """Return the text of an error for a terminal. Only lines that continue our own messages stay lines of their own."""
    return _CONTINUES.join(_cut(line, 2 * _MAX_WORD) for line in str(text).split(_CONTINUES))


def shell(text: object) -> str:
    """Return the text as one word of a command that the reader may copy."""
    return shlex.quote(_cut(str(text), _MAX_WORD))


def sheet_text(text: str) -> str:
    """Return the text for a spreadsheet: on one line, and never a formula."""
    shown = printable(text)
    return f"'{shown}" if _FORMULA.match(shown) else shown


def code(text: object) -> str:
    """Return the text as Markdown code that nothing inside it can end, in a table too; an empty text stays empty."""
    shown = plain(text)
    if not shown.strip():
        return ""
    if not set(shown) & set("`|\\"):
        return f"`{shown}`"
    # Within a table the rules for backslashes and bars are not the same everywhere; an entity is never markup.
    return f"<code>{''.join(s if s.isalnum() or s == ' ' else f'&#{ord(s)};' for s in shown)}</code>"


def xml(text: str) -> str:
    """Return the text without the characters that XML cannot hold. Escaping markup is the XML writer's job."""
    return _NOT_XML.sub("", text)


def annotation(text: str, *, is_property: bool = False) -> str:
    """Return the text as the message, or a property, of a GitHub annotation: it cannot end its line or start a command."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace(":", "%3A").replace(",", "%2C") if is_property else escaped


def _cut(text: str, most: int) -> str:
    shown = printable(text[:most])
    return f"{shown}… ({len(text) - most:,} more)" if len(text) > most else shown

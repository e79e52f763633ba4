"""Readers and writers of other tools' dumps, by name.

A reader is imported when a path is met that is no run of ours, a writer when a recorder is started with its name: a
recorder is a process of its own and imports nothing that is not listed here.

The front door registers those of `legacy`. Other packages join through an entry point in the group
`tensorprobe_readers`, or by calling `register_reader`; docs/readers.md shows one.
"""

from __future__ import annotations

from typing import NamedTuple

ENTRY_POINTS = "tensorprobe_readers"


class Reader(NamedTuple):
    """One reader: what it is called, where its function is, and how its dumps are recognised in an error message."""

    name: str
    opens: str
    """`module:function`. The function takes `(path, data)` and returns a Run, or None when the path is not its dump."""
    sign: str = ""
    """A regular expression for the names of files or folders that only such a dump has."""
    takes: str = ""
    """What to pass instead, for an error message: "the folder with …"."""


READERS: dict[str, Reader] = {}
"""Readers in the order in which they are asked."""


def register_reader(name: str, opens: str, *, sign: str = "", takes: str = "") -> None:
    """Add a reader, or replace the one of that name. Nothing is imported."""
    READERS[name] = Reader(name, opens, sign, takes)


WRITERS: dict[str, str] = {}
"""Name of a layout → `module:function`. The function takes `(options, rank)` and returns what the recorder writes to."""


def register_writer(name: str, opens: str) -> None:
    """Add the writer of a layout, or replace the one of that name. Nothing is imported."""
    WRITERS[name] = opens

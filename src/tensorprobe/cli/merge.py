"""`tensorprobe merge`: the answer of a comparison that was done in shards."""

from __future__ import annotations

from enum import Enum

import typer

from tensorprobe.cli.compare import Form, show


class PrintedForm(str, Enum):
    """What is printed. Which table is written was said when the shards were made."""

    text = "text"
    json = "json"
    md = "md"
    junit = "junit"
    github = "github"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="merge")(merge)


def merge(
    folder: str = typer.Argument(help="The output folder (or URL) of the shards."),
    form: PrintedForm = typer.Option(PrintedForm.text, "--format", help="What is printed."),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
    limit: int = typer.Option(10, min=1, help="At most so many lines in a list."),
) -> None:
    """Put the shards of 'tensorprobe compare --shard' together: the same answer and files as one comparison.

    Exit code 0: the runs agree. 1: they diverge. 2: a shard is missing, or they do not belong together.
    """
    from tensorprobe.engine import merge_shards

    show(merge_shards(folder), Form.json if as_json else Form(form.value), limit)

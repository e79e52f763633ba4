"""`tensorprobe overflow`: where the first NaN or infinity of a recorded run, or of a watched training, was born."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="overflow")(overflow)


def overflow(
    run: Path = typer.Argument(help="The folder of a run, a dump of another tool, or the folder of an overflow watch."),
    steps: str | None = typer.Option(None, help="Only these steps: 0,2-4."),
    ranks: str | None = typer.Option(None, help="Only these ranks: 0,2-4."),
    allow: list[str] = typer.Option(
        [], "--allow", help="Never blame this op, call or module; a glob. May be given several times."
    ),
    near: float | None = typer.Option(
        None, help="Also tell of outputs beyond the limit of their dtype divided by this."
    ),
    replay: bool = typer.Option(
        True, "--replay/--no-replay", help="Run births alone, where their values were recorded."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    limit: int = typer.Option(10, min=1, help="At most so many lines in a list."),
) -> None:
    """Find the call that gave birth to the first NaN or infinity, over all ranks, and say whether it was meant.

    Exit code 0: all is finite, or infinite on purpose. 1: something was born, or came in. 2: nothing could be looked at.
    """
    from tensorprobe.report.overflow_text import render_overflow
    from tensorprobe.watches.overflow.recorded import find_overflow

    result = find_overflow(run, steps=steps, ranks=ranks, allow=allow, near=near, replay=replay)
    typer.echo(result.to_json() if as_json else render_overflow(result.summary, limit=limit))
    raise typer.Exit(result.exit_code)

"""`tensorprobe overflow`: the first NaN or inf of a recorded run, or of a training that was watched."""

from __future__ import annotations

import typer

from tensorprobe.cli.options import JSON, LIMIT, format_option, option, progress, read_forms, show
from tensorprobe.model.overflow import OverflowReport
from tensorprobe.watches.overflow.settings import OverflowSettings


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="overflow")(overflow)


def overflow(
    run: str = typer.Argument(
        metavar="RUN", help="The folder of a run, a dump of another tool, or the folder of an overflow watch."
    ),
    steps: str | None = option(OverflowSettings, "steps"),
    ranks: str | None = option(OverflowSettings, "ranks"),
    allow: list[str] = option(OverflowSettings, "allow", "--allow", default=[], metavar="NAME"),
    near: float | None = option(OverflowSettings, "near", metavar="FACTOR"),
    replay: bool = option(OverflowSettings, "replay", "--replay/--no-replay"),
    max_replay_bytes: str | None = option(OverflowSettings, "max_replay_bytes", metavar="SIZE"),
    form: list[str] = format_option(OverflowReport),
    as_json: bool = JSON,
    limit: int = LIMIT,
) -> None:
    """Find the call that makes the first NaN or inf.

    All ranks are searched, and intentional infinities (masks) are recognised. Exit code 0: no unexpected NaN or inf. 1: there is one.
    2: nothing could be checked.
    """
    from tensorprobe.watches.overflow.recorded import find_overflow

    forms = read_forms(form, as_json, OverflowReport)
    with progress("searching"):
        result = find_overflow(
            run, steps=steps, ranks=ranks, allow=allow, near=near, replay=replay, max_replay_bytes=max_replay_bytes
        )
    show(result, forms, limit)

"""`tensorprobe overflow`: the first NaN or inf of a recorded run, or of a training that was watched."""

from __future__ import annotations

from pathlib import Path

import typer

from tensorprobe.cli.command import RunsCommand, is_command, watch_command
from tensorprobe.cli.options import JSON, LIMIT, OUT, format_option, option, progress, read_forms, show
from tensorprobe.errors import SettingsError
from tensorprobe.model.overflow import OverflowReport
from tensorprobe.watches.overflow.settings import OverflowSettings


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="overflow", cls=RunsCommand)(overflow)


def overflow(
    run: list[str] = typer.Argument(
        metavar="RUN|COMMAND...",
        help="The folder of a run, a dump of another tool, or the folder of an overflow watch; or, after --, a command to watch.",
    ),
    out: Path | None = option(OverflowSettings, "out", *OUT, metavar="FOLDER"),
    overwrite: bool = option(OverflowSettings, "overwrite", "--overwrite"),
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
    """Find the first NaN or inf, in a run or while a command runs.

    The answer names the call that makes it, in a run or in a command that is started here (`-- COMMAND`). All ranks are
    searched, and intentional infinities (masks) are recognised. Exit code 0: no unexpected NaN or inf. 1: there is one.
    2: nothing could be checked. If a watched command fails, its exit code is returned. Without -o, what a watch finds is in the
    first free one of tensorprobe-overflow, tensorprobe-overflow-2, …
    """
    from tensorprobe.watches.overflow.recorded import find_overflow

    forms = read_forms(form, as_json, OverflowReport)
    if out is not None and len(run) == 1 and Path(run[0]).is_dir():
        raise SettingsError("-o is for a command that is watched. For a run, write the page with --format html=FILE.")
    if out is not None or is_command(run):
        settings = {
            "steps": steps,
            "ranks": ranks,
            "allow": allow,
            "near": near,
            "replay": replay,
            "overwrite": overwrite,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        OverflowSettings.of(**settings)
        code, folder = watch_command("overflow", run, out, settings)
        show(find_overflow(str(folder)), forms, limit, code=code)
    if len(run) > 1:
        raise SettingsError(
            f"{len(run)} arguments; expected one RUN. To watch a command: tensorprobe overflow -- COMMAND"
        )
    with progress("searching"):
        result = find_overflow(
            run[0], steps=steps, ranks=ranks, allow=allow, near=near, replay=replay, max_replay_bytes=max_replay_bytes
        )
    show(result, forms, limit)

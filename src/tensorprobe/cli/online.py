"""`tensorprobe online`: compare every ATen call of a command with the CPU, without editing its script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tensorprobe.cli.command import RunsCommand, watch_command
from tensorprobe.cli.options import JSON, LIMIT, OUT, option
from tensorprobe.watches.online.settings import OnlineSettings


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="online", cls=RunsCommand)(online)


def online(
    command: list[str] = typer.Argument(
        metavar="COMMAND...", help="The command to run, after --, e.g. -- python train.py"
    ),
    out: Path | None = option(OnlineSettings, "out", *OUT, metavar="FOLDER"),
    reference: str = option(OnlineSettings, "reference"),
    policy: str = option(OnlineSettings, "policy", metavar="NAME|FILE"),
    chain: bool = option(OnlineSettings, "chain", "--chain"),
    every: int = option(OnlineSettings, "every", metavar="N"),
    once_per_kind: bool = option(OnlineSettings, "once_per_kind", "--once-per-kind"),
    op: list[str] = option(OnlineSettings, "ops", "--op", default=[]),
    module: list[str] = option(OnlineSettings, "modules", "--module", default=[]),
    steps: str | None = option(OnlineSettings, "steps"),
    library: list[str] = option(OnlineSettings, "libraries", "--library", default=[], metavar="NAME"),
    workers: int = option(OnlineSettings, "workers", metavar="N"),
    overwrite: bool = option(OnlineSettings, "overwrite", "--overwrite"),
    as_json: bool = JSON,
    limit: int = LIMIT,
) -> None:
    """Compare each ATen call of a command with the CPU, while it runs.

    The script is not edited. Watching begins when it calls the first module. Exit code 0: all calls agree. 1: a call fails.
    2: nothing was compared. If the command fails, its exit code is returned. Without -o, the results are in the first free one of
    tensorprobe-online, tensorprobe-online-2, …
    """
    from tensorprobe.cli.results import open_result
    from tensorprobe.report.forms import render

    settings: dict[str, Any] = {
        "reference": reference, "policy": policy, "chain": chain, "every": every, "once_per_kind": once_per_kind, "ops": op,
        "modules": module, "steps": steps, "libraries": library, "workers": workers, "overwrite": overwrite,
    }  # fmt: skip
    OnlineSettings.of(on_fail="report", **settings)
    code, folder = watch_command("online", command, out, settings)
    places = sorted(found.parent for found in folder.glob("rank*/online.json"))
    found = [open_result(place) for place in places]
    for place, result in zip(places, found, strict=True):
        extra = {} if as_json else {"folder": str(place)}
        typer.echo(render(result, "json" if as_json else "text", limit=limit, **extra))
    raise typer.Exit(code or max(result.exit_code for result in found))

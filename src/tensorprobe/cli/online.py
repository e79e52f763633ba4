"""`tensorprobe online`: compare every ATen call of a command with the CPU, without editing its script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from tensorprobe.cli.command import demand_dashes, run_command
from tensorprobe.cli.options import JSON, LIMIT, OUT, option
from tensorprobe.watches.online.settings import OnlineSettings


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="online")(online)


def online(
    command: list[str] = typer.Argument(
        metavar="COMMAND...", help="The command to run, after --, e.g. -- python train.py"
    ),
    out: Path = typer.Option(..., *OUT, metavar="FOLDER", help="Folder for the report and the failing calls."),
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
    """Compare every ATen call of a command with the same call on the CPU, while it runs.

    The script is not edited. Watching begins when it calls the first module. Exit code 0: all calls agree. 1: a call fails.
    2: nothing was compared. If the command fails, its exit code is returned.
    """
    from tensorprobe.cli.results import open_result
    from tensorprobe.errors import CommandFailed
    from tensorprobe.inject.watch import HOOK
    from tensorprobe.record.run_folder import check_writable
    from tensorprobe.report.forms import render

    demand_dashes(command, sys.argv[1:])
    settings: dict[str, Any] = {
        "out": str(out.absolute()), "reference": reference, "policy": policy, "chain": chain, "every": every,
        "once_per_kind": once_per_kind, "ops": op, "modules": module, "steps": steps, "libraries": library,
        "workers": workers, "overwrite": overwrite,
    }  # fmt: skip
    OnlineSettings.of(**settings)
    check_writable(out.absolute())
    code = run_command(command, {HOOK: json.dumps({"kind": "online", "settings": settings})})
    places = sorted(found.parent for found in out.glob("rank*/online.json"))
    if not places:
        if code:
            raise typer.Exit(code)
        raise CommandFailed(
            f"{command[0]!r} ended and no call of it was compared: no Python process called a torch module."
        )
    found = [open_result(place) for place in places]
    for place, result in zip(places, found, strict=True):
        extra = {} if as_json else {"folder": str(place)}
        typer.echo(render(result, "json" if as_json else "text", limit=limit, **extra))
    raise typer.Exit(code or max(result.exit_code for result in found))

"""`tensorprobe sim`: run a script on the simulated device, with faults to order."""

from __future__ import annotations

import os
import sys

import typer

from tensorprobe.cli.command import RunsCommand
from tensorprobe.cli.options import JSON
from tensorprobe.errors import CommandFailed, SettingsError


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="sim", cls=RunsCommand)(sim)


def sim(
    command: list[str] = typer.Argument(
        None,
        metavar="[COMMAND...]",
        help="The command to run, after --, e.g. -- python train.py --device npu",
    ),
    fault: list[str] = typer.Option(
        [], "--fault", metavar="FAULT", help="A name from the catalog, a .json or .toml file, or JSON."
    ),
    name: str = typer.Option("npu", metavar="NAME", help="The name of the device in torch."),
    torch_npu: bool = typer.Option(False, "--torch-npu", help="Import the stand-in for torch_npu with torch."),
    list_faults: bool = typer.Option(False, "--list", help="Print the catalog of faults."),
    as_json: bool = JSON,
) -> None:
    """Run a command with a simulated device.

    The device runs on the CPU and has the faults that you choose. The script is not edited and selects the device itself,
    e.g. tensorprobe sim --fault softmax-tail -- python train.py --device npu
    """
    if list_faults:
        _print_catalog(as_json)
        return
    if not command:
        raise SettingsError(
            "the command is missing. Put it after --, e.g. tensorprobe sim -- python train.py --device npu"
        )
    from tensorprobe.inject import environment
    from tensorprobe.inject import sim as autostart
    from tensorprobe.sim import read_faults

    faults = [one for text in fault for one in read_faults(text)]
    hooks = {autostart.HOOK: autostart.payload(name, faults, torch_npu=torch_npu)}
    started_with = environment(hooks, os.environ)
    sys.stdout.flush()
    try:
        # The command takes the place of this process: signals and the exit code are its own.
        os.execvpe(command[0], command, started_with)
    except OSError as error:
        raise CommandFailed(f"cannot start {command[0]!r}: {error.strerror}.") from None


def _print_catalog(as_json: bool) -> None:
    from tensorprobe.sim.known_faults import ENTRIES

    if as_json:
        from tensorprobe.standard_json import encode

        facts = [
            {"name": entry.name, "op": entry.fault.op, "about": entry.about, "strikes": entry.fault.waits_for}
            for entry in ENTRIES
        ]
        typer.echo(encode(facts))
        return
    width = max(len(entry.name) for entry in ENTRIES)
    for entry in ENTRIES:
        typer.echo(f"{entry.name:{width}}  {entry.about}")
        typer.echo(f"{'':{width}}  affects {entry.fault.waits_for}")
    typer.echo(
        "In a program without that module or call, a fault affects another call of the op, from the second pass on."
    )

"""`tensorprobe sim`: run a script on the simulated device, with faults to order."""

from __future__ import annotations

import os
import sys

import typer

from tensorprobe.errors import CommandFailed, SettingsError


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="sim")(sim)


def sim(
    command: list[str] = typer.Argument(
        None, help="After --: the command to run, as in: -- python train.py --device npu"
    ),
    fault: list[str] = typer.Option(
        [], "--fault", help="A name of the catalog, a .json or .toml file, or JSON itself. May be given several times."
    ),
    name: str = typer.Option("npu", help="What torch calls the device."),
    torch_npu: bool = typer.Option(False, "--torch-npu", help="Let `import torch_npu` find a stand-in."),
    list_faults: bool = typer.Option(False, "--list", help="Print the catalog of faults and stop."),
) -> None:
    """Run a command in which torch has one more device: simulated on the CPU, and wrong where you say.

    The script is not edited. It chooses the device itself, as in: tensorprobe sim --fault softmax-tail -- python
    train.py --device npu
    """
    if list_faults:
        _print_catalog()
        return
    if not command:
        raise SettingsError(
            "no command to run. Put it after --, as in: tensorprobe sim -- python train.py --device npu"
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


def _print_catalog() -> None:
    from tensorprobe.sim.known_faults import ENTRIES

    width = max(len(entry.name) for entry in ENTRIES)
    for entry in ENTRIES:
        typer.echo(f"{entry.name:{width}}  {entry.fault.op.partition('::')[2]}: {entry.about}")

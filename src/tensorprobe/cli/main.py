"""The program `tensorprobe`: gathers the commands and turns errors into messages and exit codes.

Exit 0: done, or the runs agree. 1: diverged, or a check failed. 2: bad input. 3: our own bug.
"""

from __future__ import annotations

from importlib import import_module

import typer

from tensorprobe.report.ending import guarded
from tensorprobe.version import VERSION

_COMMANDS = (
    "capture",
    "compare",
    "find",
    "diff",
    "report",
    "view",
    "audit",
    "precheck",
    "overflow",
    "inspect",
    "export",
    "sim",
    "doctor",
)

app = typer.Typer(
    name="tensorprobe",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the tables that rich draws show <bool> beside flags, and cut names
    help="Find the first op where two PyTorch runs part ways, and say why.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensorprobe {VERSION}")
        raise typer.Exit


@app.callback()
def _program(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for _name in _COMMANDS:
    import_module(f"tensorprobe.cli.{_name}").register(app)


def main() -> None:
    """Run the program and exit."""
    guarded(app)

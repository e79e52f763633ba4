"""The program `tensorprobe`: gathers the commands and turns errors into messages and exit codes.

Exit 0: done, or the runs agree. 1: diverged, or a check failed. 2: bad input. 3: our own bug.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

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
    "online",
    "overflow",
    "inspect",
    "export",
    "sim",
    "doctor",
)


def _help_of(argument: Any, context: Any) -> tuple[str, str] | None:
    record = type(argument).get_help_record(argument, context)
    name = argument.metavar or argument.name.upper()
    return None if record is None else (name[1:-1] if name.startswith("[") else name, record[1])


def _usage_of(argument: Any, context: Any) -> list[str]:
    return [] if argument.hidden else [argument.metavar or argument.name.upper()]


class _Program(TyperGroup):
    """Shows arguments by their names alone. Some versions of typer add types and braces: `{RUN}`, `RUN <str>`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for param in () if command is None else command.params:
            if param.param_type_name == "argument":
                vars(param).update(get_help_record=partial(_help_of, param), get_usage_pieces=partial(_usage_of, param))
        return command


app = typer.Typer(
    name="tensorprobe",
    cls=_Program,
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

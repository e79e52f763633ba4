"""The program `tensorprobe`: gathers the commands and turns errors into messages and exit codes.

Exit 0: done, or the runs agree. 1: diverged, or a check failed. 2: bad input. 3: our own bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tensorprobe.cli.config import PREFIX, apply_file
from tensorprobe.report.ending import guarded
from tensorprobe.version import VERSION

COMMANDS = {
    "capture": "Record the PyTorch calls of a command.",
    "compare": "Find the first call where two runs part ways.",
    "merge": "Merge the shards of 'compare --shard'.",
    "find": "Run two commands and find the first call where they part ways.",
    "diff": "Show how the tensors of a call differ between two runs.",
    "report": "Write the page of a result: one HTML file for a browser.",
    "view": "Show the page with full tensors, from a server on this machine.",
    "audit": "Check what was recorded of each call of one run.",
    "precheck": "Run each call of a run on its own and check the result.",
    "online": "Compare each ATen call of a command with the CPU, while it runs.",
    "overflow": "Find the first NaN or inf, in a run or while a command runs.",
    "inspect": "Show what a run, a call or a result holds.",
    "export": "Write tensors as .npy or .safetensors files.",
    "sim": "Run a command with a simulated device.",
    "doctor": "Show what is installed, and test that capture works.",
    "config": "Show every setting and where its value comes from.",
}
"""What each command does: the first sentence of its help. Its module is imported when it is called."""
_ELSEWHERE = {"merge": "compare"}
"""Commands whose module has another name."""


def load(name: str) -> typer.Typer:
    """Import the module of a command and return what it registers."""
    part = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
    import_module(f"tensorprobe.cli.{_ELSEWHERE.get(name, name)}").register(part)
    return part


class _Commands(Mapping[str, Any]):
    """The commands by name; one is made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._made:
            self._made |= typer.main.get_group(load(name)).commands
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _help_of(argument: Any, context: Any) -> tuple[str, str] | None:
    record = type(argument).get_help_record(argument, context)
    name = argument.metavar or argument.name.upper()
    return None if record is None else (name[1:-1] if name.startswith("[") else name, record[1])


def _usage_of(argument: Any, context: Any) -> list[str]:
    return [] if argument.hidden else [argument.metavar or argument.name.upper()]


class _Program(TyperGroup):
    """Shows arguments by their names alone, and no variables: `tensorprobe config` says how these are called.

    Some versions of typer add types and braces: `{RUN}`, `RUN <str>`.
    """

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)
        for param in found:
            vars(param)["show_envvar"] = False
        return found

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without importing them."""
        commands, self.commands = (
            self.commands,
            {name: TyperCommand(name, help=help) for name, help in COMMANDS.items()},
        )
        super().format_commands(ctx, formatter)
        self.commands = commands

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for param in () if command is None else command.params:
            vars(param)["show_envvar"] = False
            if param.param_type_name == "argument":
                vars(param).update(get_help_record=partial(_help_of, param), get_usage_pieces=partial(_usage_of, param))
        return command


app = typer.Typer(
    name="tensorprobe",
    cls=_Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": PREFIX},
    rich_markup_mode=None,  # the tables that rich draws show <bool> beside flags, and cut names
    help="Find the first op where two PyTorch runs part ways, and say why.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensorprobe {VERSION}")
        raise typer.Exit


@app.callback()
def _program(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        allow_from_autoenv=False,
        help="Print the version.",
    ),
) -> None:
    apply_file(context)


def main() -> None:
    """Run the program and exit."""
    guarded(app)

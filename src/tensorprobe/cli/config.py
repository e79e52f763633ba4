"""Settings of the commands from a file or the environment, and `tensorprobe config`, which shows where each value comes from.

A flag beats a variable, a variable beats the file, the file beats the default. The file is the nearest `tensorprobe.toml`, or
`pyproject.toml` with a table `[tool.tensorprobe]`, in the current folder or above. It has a table for each command:

    [compare]
    jobs = 4
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from tensorprobe.cli.options import JSON
from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.files import read_file, read_toml
from tensorprobe.text import plain

PREFIX = "TENSORPROBE"
_NAMES = ("tensorprobe.toml", "pyproject.toml")
_SECTION = "tool.tensorprobe"
_FAULTS = "TENSORPROBE_SIM_FAULTS"
"""Read by the simulated device, and no setting."""
_LEFT_OUT = ("help", "install_completion", "show_completion")


class Found(NamedTuple):
    """A file with settings: its path, how to name it, and a table for each command."""

    path: Path
    name: str
    tables: dict[str, Any]


class Shown(NamedTuple):
    """One setting of a command."""

    command: str
    setting: str
    value: Any
    source: str


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="config", context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})(
        config
    )


def apply_file(context: typer.Context) -> None:
    """Make the settings of the file the defaults of the command that is called. UnknownSetting for a misspelt variable."""
    commands = context.command.commands  # type: ignore[attr-defined]
    name = context.invoked_subcommand
    if name is not None and name in commands:
        known = [param.envvar or _variable(name, param.name) for param in commands[name].params]
        for given in os.environ:
            if given.startswith(_variable(name, "")) and given not in (*known, _FAULTS):
                raise UnknownSetting(f"unknown variable {given!r} in the environment.{did_you_mean(given, known)}")
    found = find_file(Path.cwd())
    if found is None:
        return
    context.default_map = {
        name: _read_table(found, name, table, commands, context) for name, table in found.tables.items()
    }


def find_file(folder: Path) -> Found | None:
    """Return the nearest file with settings; None when there is none."""
    for place in (folder, *folder.parents):
        for name in _NAMES:
            path = place / name
            if not path.is_file():
                continue
            if name == _NAMES[0]:
                return Found(path, str(path), _read(path))
            if _SECTION.encode() in read_file(path):  # a file that is not for us may hold what we refuse
                return Found(path, f"[{_SECTION}] in {path}", _read(path).get("tool", {}).get("tensorprobe", {}))
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except ValueError as error:
        raise SettingsError(f"'{path}' is not valid TOML: {error}.") from None


def _read_table(found: Found, command: str, table: Any, commands: dict[str, Any], context: Any) -> dict[str, Any]:
    if command not in commands and not isinstance(table, dict):
        raise SettingsError(
            f"{command!r} in {found.name} belongs to no command. Put it into a table, such as [compare]."
        )
    if command not in commands:
        raise UnknownSetting(f"unknown command {command!r} in {found.name}.{did_you_mean(command, commands)}")
    if not isinstance(table, dict):
        raise SettingsError(f"{command!r} in {found.name} is {table!r}; expected a table, [{command}].")
    options = dict(_options(commands[command]))
    given: dict[str, Any] = {}
    for key, value in table.items():
        option = options.get(key.replace("_", "-"))
        if option is None:
            raise UnknownSetting(f"unknown setting {key!r} of [{command}] in {found.name}.{did_you_mean(key, options)}")
        several = option.multiple or option.nargs > 1
        if isinstance(value, list) is not several:
            if isinstance(value, list):
                raise SettingsError(f"{key!r} of [{command}] in {found.name} is a list; expected one value.")
            value = [value]
        value = [_as_typed(each) for each in value] if several else _as_typed(value)
        try:
            option.process_value(context, value)
        except Exception as error:  # typer brings a click of its own, whose exceptions have no public name
            told = getattr(error, "message", None)
            if told is None:
                raise
            raise SettingsError(f"{key!r} of [{command}] in {found.name}: {told}") from None
        given[option.name] = value
    return given


def _as_typed(value: Any) -> Any:
    """Return a value as the command line would have it."""
    return value if isinstance(value, bool) else str(value)


def _options(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command by their long names."""
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden and param.name not in _LEFT_OUT:
            yield max(param.opts, key=len).lstrip("-"), param


def config(
    context: typer.Context,
    command: list[str] = typer.Argument(
        None, metavar="[COMMAND...]", help="Only this command. With options after it, as if it were called with them."
    ),
    as_json: bool = JSON,
) -> None:
    """Show every setting and where its value comes from.

    A flag beats an environment variable (TENSORPROBE_COMPARE_JOBS=4), which beats the nearest tensorprobe.toml or
    [tool.tensorprobe] in pyproject.toml, which beats the default. The files have a table for each command, such as [compare].
    """
    from tensorprobe.standard_json import encode

    root = context.find_root()
    commands: dict[str, Any] = root.command.commands  # type: ignore[attr-defined]
    words = command or []
    if words and words[0] not in commands:
        raise SettingsError(f"no command {words[0]!r}.{did_you_mean(words[0], commands)}")
    found = find_file(Path.cwd())
    chosen = {words[0]: words[1:]} if words else {name: [] for name in commands if name != "config"}
    shown = [line for name, args in chosen.items() for line in _settings(root, name, commands[name], args, found)]
    if as_json:
        typer.echo(encode([line._asdict() for line in shown]))
        return
    file = "no tensorprobe.toml, and no [tool.tensorprobe] in pyproject.toml, here or above"
    typer.echo(f"File: {file if found is None else plain(found.name)}")
    widths = [max(len(plain(line[at])) for line in shown) for at in (1, 2)] if shown else [0, 0]
    for name in chosen:
        lines = [line for line in shown if line.command == name]
        if lines:
            typer.echo(f"\n[{name}]")
        for line in lines:
            setting, value = plain(line.setting).ljust(widths[0]), plain(line.value).ljust(min(widths[1], 30))
            typer.echo(f"  {setting}  {value}  {plain(line.source)}")


def _settings(root: Any, name: str, command: Any, args: list[str], found: Found | None) -> Iterator[Shown]:
    command.make_parser(type(root)(command, info_name=name, parent=root)).parse_args(
        list(args)
    )  # refuses what it refuses
    read = command.make_context(name, list(args), parent=root, resilient_parsing=True)
    for long, option in _options(command):
        value = read.params.get(option.name)
        kind = getattr(read.get_parameter_source(option.name), "name", "")
        sources = {
            "COMMANDLINE": "flag",
            "ENVIRONMENT": f"environment: {option.envvar or _variable(name, option.name)}",
            "DEFAULT_MAP": "" if found is None else f"file: {found.path.name}",
        }
        yield Shown(name, long, _spelled(value), sources.get(kind, "default"))


def _variable(command: str, option: str) -> str:
    return f"{PREFIX}_{command}_{option}".upper().replace("-", "_")


def _spelled(value: Any) -> str:
    """Return a value as it is written in the file."""
    if value is None or value == [] or value == ("", ""):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

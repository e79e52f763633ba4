"""Writes docs/cli.md from the program itself: its commands, their options, and the table of settings.

python tools/make_cli_docs.py            write the file
python tools/make_cli_docs.py --check    exit 1 when the file is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from tensorprobe.checks.settings import AuditSettings, PrecheckSettings
from tensorprobe.cli.main import COMMANDS, load
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.settings import Settings
from tensorprobe.taps.settings import CaptureSettings
from tensorprobe.watches.online.settings import OnlineSettings
from tensorprobe.watches.overflow.settings import OverflowSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

HEAD = """\
# The command line

<!-- Written by tools/make_cli_docs.py from the program itself: change the program, then run that. -->

`tensorprobe COMMAND --help` shows the same options. stdout is the result; stderr is progress, warnings and errors.

| exit code | meaning |
|---|---|
| 0 | done; the runs agree; nothing was found |
| 1 | the runs diverge; a check failed; there is a NaN or inf; `inspect --verify` found damage |
| 2 | no answer: no such run or call, a bad setting, nothing to compare, nothing recorded; `doctor`: capture cannot work here |
| 3 | a bug of tensorprobe; please report it |

`capture`, `online` and `overflow` around a command that fails end with the exit code of that command. If a signal ended
it, that is 128 + the number of the signal.
"""

TABLES: dict[str, tuple[str, type[Settings]]] = {
    "capture": ("a capture", CaptureSettings),
    "compare": ("a comparison", CompareSettings),
    "audit": ("an audit", AuditSettings),
    "precheck": ("a precheck", PrecheckSettings),
    "online": ("an online compare", OnlineSettings),
    "overflow": ("an overflow search", OverflowSettings),
}
"""Command → what its table of settings is about, and the table."""

SETTINGS_HEAD = """\
## Settings of {about}

The same settings are keywords of `tensorprobe.{command}(...)`. Sizes can be written as
`512M` or `2G`. An unknown keyword is an error that names the nearest known one.

| setting | default | meaning | option |
|---|---|---|---|
"""


def render() -> str:
    """Return the whole page."""
    commands = [_command(name, function) for name, function in list_commands()]
    return "\n".join([HEAD, *commands, *(_settings(command) for command in TABLES)])


def list_commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each command with its function."""
    for name in COMMANDS:
        functions = {command.name: command.callback for command in load(name).registered_commands}
        function = functions[name]
        assert function is not None
        yield name, function


def _command(name: str, function: Callable[..., Any]) -> str:
    arguments, options = [], []
    for parameter, info, annotation in _parameters(function):
        if isinstance(info, ArgumentInfo):
            arguments.append((parameter, info, _is_list(annotation)))
        else:
            options.append((parameter, info, annotation))
    required = [_flags(parameter, info, annotation)[-1] for parameter, info, annotation in options if _required(info)]
    usage = " ".join(
        [
            f"tensorprobe {name}",
            *(f"{flag} {_metavar(flag)}" for flag in required),
            "[OPTIONS]",
            *(_placeholder(parameter, info, many) for parameter, info, many in arguments),
        ]
    )
    lines = [f"## tensorprobe {name}", "", inspect.cleandoc(function.__doc__ or ""), "", f"    {usage}", ""]
    lines += ["| argument or option | meaning | default |", "|---|---|---|"]
    lines += [
        f"| `{_bare(parameter, many)}` | {_cell(info.help)} | {_default(info)} |" for parameter, info, many in arguments
    ]
    for parameter, info, annotation in options:
        flags = ", ".join(f"`{flag}`" for flag in _flags(parameter, info, annotation))
        again = " (may be given several times)" if _is_list(annotation) else ""
        lines.append(f"| {flags} | {_cell(info.help)}{again} | {_default(info)} |")
    return "\n".join([*lines, ""])


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, ArgumentInfo | OptionInfo, Any]]:
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, (ArgumentInfo, OptionInfo)) and not parameter.default.hidden:
            yield name, parameter.default, hints[name]


def _flags(parameter: str, info: ArgumentInfo | OptionInfo, annotation: Any) -> list[str]:
    """`-o`, `--out`, `--stacks/--no-stacks`: short ones first."""
    declared = list(info.param_decls or ())
    if not declared:
        long = "--" + parameter.replace("_", "-")
        declared = [f"{long}/--no-{long[2:]}" if annotation is bool else long]
    return sorted((flag for entry in declared for flag in entry.split("/")), key=lambda flag: flag.startswith("--"))


def _required(info: ArgumentInfo | OptionInfo) -> bool:
    return info.default is ...


def _default(info: ArgumentInfo | OptionInfo) -> str:
    if _required(info):
        return "required"
    if info.default in (None, False, [], ("", "")):
        return ""
    return f"`{info.default.value if isinstance(info.default, Enum) else info.default}`"


def _placeholder(parameter: str, info: ArgumentInfo, many: bool) -> str:
    shown = "-- " + _bare(parameter, many) if many else _bare(parameter, many)
    return shown if _required(info) else f"[{shown}]"


def _bare(parameter: str, many: bool) -> str:
    return parameter.upper() + ("..." if many else "")


def _metavar(flag: str) -> str:
    return flag.lstrip("-").upper()


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(get_origin(part) is list for part in get_args(annotation))


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def _settings(command: str) -> str:
    about, table = TABLES[command]
    function = dict(list_commands()).get(command)
    by_help = {
        info.help: _flags(parameter, info, annotation)
        for parameter, info, annotation in (_parameters(function) if function is not None else ())
    }
    lines = []
    for name, declared in table.declared().items():
        flags = by_help.get(declared.help)
        option = " ".join(f"`{flag}`" for flag in flags) if flags else "none: Python only"
        lines.append(f"| `{name}` | {_setting_default(declared.default)} | {_cell(declared.help)} | {option} |")
    return SETTINGS_HEAD.format(about=about, command=command) + "\n".join(lines) + "\n"


def _setting_default(value: Any) -> str:
    if value in (None, ()):
        return ""
    return f"`{', '.join(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != render())
    PAGE.write_text(render(), encoding="utf-8")

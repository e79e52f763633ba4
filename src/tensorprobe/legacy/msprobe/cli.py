"""The program `msprobe`, in the spellings of all its generations: `msprobe -f pytorch run_ut …`, `msprobe acc_check …`.

Exit 0: done, or the dumps agree. 1: they differ, or a check failed. 2: wrong input. 3: our own bug. A command's code is
imported when it is asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.report.ending import guarded
from tensorprobe.version import VERSION

_COMMANDS = {
    "compare": (
        "tensorprobe.legacy.msprobe.cli_commands:compare",
        "compare the dump of a device with that of the bench",
    ),
    "run_ut": ("tensorprobe.legacy.msprobe.cli_checks:run_ut", "check each recorded API alone"),
    "acc_check": ("tensorprobe.legacy.msprobe.cli_checks:run_ut", "the newer name of run_ut"),
    "multi_run_ut": ("tensorprobe.legacy.msprobe.cli_checks:multi_run_ut", "the same in several processes"),
    "multi_acc_check": ("tensorprobe.legacy.msprobe.cli_checks:multi_run_ut", "the newer name of multi_run_ut"),
    "run_overflow_check": (
        "tensorprobe.legacy.msprobe.cli_commands:run_overflow_check",
        "whether an overflow is to be expected",
    ),
    "overflow_check": (
        "tensorprobe.legacy.msprobe.cli_commands:overflow_check",
        "where a dump has its first NaN or infinity",
    ),
    "parse": ("tensorprobe.legacy.msprobe.cli_commands:parse", "the tensors of a dump as .npy or .pt files"),
}
_ELSEWHERE = {
    "api_precision_compare": "run_ut judges against a reference of higher precision; compare its two tables by eye",
    "merge_result": "tensorprobe compare BENCH NPU -o FOLDER   has all ranks in one table",
    "graph_visualize": "tensorprobe inspect RUN   lists calls with their modules",
    "config_check": "there is nothing like it",
    "data2db": "tensorprobe compare … --format parquet   gives a table that databases read",
    "offline_dump": "there is nothing like it",
    "install_deps": "pip install 'tensorprobe[xlsx]'",
}
_FRAMEWORKS = ("pytorch", "mindspore")


def main() -> None:
    """Run the program and exit."""
    guarded(lambda: run(sys.argv[1:]), about="dump")


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command; TensorprobeError for what the user can mend."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("-h", "--help"):
            return _say(_help())
        if option in ("-V", "-v", "--version"):
            return _say(f"msprobe of tensorprobe {VERSION}")
        _demand_pytorch(option, words)
    if not words:
        sys.stderr.write(_help() + "\n")
        return 2
    command, *rest = words
    if command in _ELSEWHERE:
        raise SettingsError(f"'msprobe {command}' is not part of tensorprobe: {_ELSEWHERE[command]}.")
    if command not in _COMMANDS:
        raise SettingsError(
            f"msprobe has no command {command!r}.{did_you_mean(command, _COMMANDS)}\n  There are {', '.join(_COMMANDS)}."
        )
    module, _, function = _COMMANDS[command][0].partition(":")
    code: int = getattr(import_module(module), function)(command, rest)
    return code


def _demand_pytorch(option: str, words: list[str]) -> None:
    """Take the framework off the words; it must be the one that there is."""
    name, has_value, framework = option.partition("=")
    if name not in ("-f", "--framework"):
        known = ("-f", "--framework", "--help", "--version")
        raise SettingsError(f"msprobe has no option {name!r}.{did_you_mean(name, known)} There are {', '.join(known)}.")
    if not has_value:
        framework = words.pop(0) if words else ""
    if framework != "pytorch":
        about = "only pytorch is here" if framework in _FRAMEWORKS else "it must be pytorch"
        raise SettingsError(f"{name} is {framework!r}; {about}.{did_you_mean(framework, _FRAMEWORKS)}")


def _help() -> str:
    lines = [f"  {name:<20}{about}" for name, (_, about) in _COMMANDS.items()]
    return "\n".join(
        ["usage: msprobe [-f pytorch] COMMAND [options]", "", *lines, "", "msprobe COMMAND --help lists its options."]
    )


def _say(text: str) -> int:
    sys.stdout.write(text + "\n")
    return 0


class Options(argparse.ArgumentParser):
    """`msprobe COMMAND …`; wrong options are SettingsErrors."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"msprobe {command}", description=description, allow_abbrev=False)
        self._command = command

    def switch(self, *names: str, help: str) -> None:
        """An option without a value."""
        self.add_argument(*names, action="store_true", help=help)

    def read(self, arguments: Sequence[str]) -> Any:
        """The values; what begins with a dash and is no option is named before argparse guesses what it may be."""
        known = sorted(self._option_string_actions)
        for word in arguments:
            name = word.partition("=")[0]
            if word.startswith("-") and len(word) > 1 and name not in known:
                raise UnknownSetting(
                    f"'msprobe {self._command}' has no option {name!r}.{did_you_mean(name, known)}\n"
                    f"  There are {', '.join(known)}."
                )
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong."""
        raise SettingsError(f"msprobe {self._command}: {message}.\n  See   msprobe {self._command} --help")

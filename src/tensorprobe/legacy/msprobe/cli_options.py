"""The options of one command: an unknown one is an error that names the nearest, and a mistake never ends the process here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean


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

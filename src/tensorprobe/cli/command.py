"""Runs the command of a user, with hooks of ours in its Python processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import IO

from tensorprobe.errors import CommandFailed, SettingsError
from tensorprobe.inject import environment
from tensorprobe.text import shell


def demand_dashes(command: list[str], given: list[str]) -> None:
    """Refuse options after the command's first word when no -- stands before it: they would be taken for ours."""
    if "--" in given or command[0] not in given:
        return
    first = given.index(command[0])
    if any(word.startswith("-") for word in given[first:]):
        typed = " ".join(shell(word) for word in (*given[:first], "--", *given[first:]))
        raise SettingsError(
            f"put -- before the command, so that its options are not taken for ours:\n  tensorprobe {typed}"
        )


def run_command(command: list[str], hooks: Mapping[str, str], log: IO[bytes] | None = None) -> int:
    """Run a command with these hooks in its Python processes. Return its exit code; like a shell, 128 + the signal that ended it.

    What it prints goes to `log`, if there is one.
    """
    try:
        process = subprocess.Popen(command, env=environment(hooks, os.environ), stdout=log, stderr=log)
    except OSError as error:
        raise CommandFailed(f"cannot start {command[0]!r}: {error.strerror}.") from None
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # the command got it too; it decides when to end

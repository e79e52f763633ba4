"""Runs the command of a user, with hooks of ours in its Python processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any

import typer
from typer.core import TyperCommand

from tensorprobe.errors import CommandFailed, RunExists, SettingsError, did_you_mean
from tensorprobe.inject import environment
from tensorprobe.text import shell


class RunsCommand(TyperCommand):
    """A command that runs one of the user, whose options need a `--` before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer brings a click of its own, whose exceptions have no public name
            option = getattr(error, "option_name", None)
            if "--" in given or option is None:
                raise
            close = did_you_mean(str(option), [name for param in self.params for name in param.opts])
            raise SettingsError(
                f"tensorprobe {ctx.info_name} has no option {option}.{close}\n"
                f"  An option of your own command? Put -- before it: tensorprobe {ctx.info_name} [OPTIONS] -- COMMAND {option}"
            ) from None


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
        advice = f"\n  To run a script: python {shell(command[0])}" if command[0].endswith(".py") else ""
        raise CommandFailed(f"cannot start {command[0]!r}: {error.strerror}.{advice}") from None
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # the command got it too; it decides when to end


@contextmanager
def aside(old: Iterable[Path], *, unless: Callable[[], bool]) -> Iterator[None]:
    """Put files and folders out of the way. After the block they are back, or deleted if `unless` says so: there are new ones."""
    moved: list[tuple[Path, Path]] = []
    try:
        for path in old:
            kept = path.with_name(f".rank.old.{path.name}")
            if kept.is_dir():  # of a command that was killed
                shutil.rmtree(kept)
            moved.append((path, path.rename(kept)))
        yield
    finally:
        replaced = unless()
        for path, kept in moved:
            if kept.exists() and not replaced:  # a watch that begins clears its own folder
                kept.rename(path)
            elif kept.is_dir():
                shutil.rmtree(kept)
            else:
                kept.unlink(missing_ok=True)


_RESULTS = {"online": "rank*/online.json", "overflow": "overflow.rank*.json"}


def is_command(words: list[str]) -> bool:
    """Return whether words behind -- are a command, and not the path of a run."""
    return "--" in sys.argv[1:] and (len(words) > 1 or shutil.which(words[0]) is not None)


def watch_command(kind: str, command: list[str], out: Path | None, settings: dict[str, Any]) -> tuple[int, Path]:
    """Run a command under a watch; return its exit code and the folder of the results: `out`, or one that is made here.

    Raise RunExists before the command runs when the folder holds results, CommandFailed when nothing was watched.
    """
    from tensorprobe.inject.watch import HOOK
    from tensorprobe.record.run_folder import check_writable

    demand_dashes(command, sys.argv[1:])
    if out is None:
        names = (f"tensorprobe-{kind}{f'-{number}' if number > 1 else ''}" for number in count(1))
        out = next(folder for name in names if not (folder := Path(name)).exists())
    if (old := list(out.glob(_RESULTS[kind]))) and not settings["overwrite"]:
        raise RunExists(
            f"{str(out)!r} holds the results of another watch. The command was not run.\n"
            "  Choose another folder, or pass --overwrite to replace them."
        )
    check_writable(out.absolute())
    orders = {"kind": kind, "settings": {"out": str(out.absolute()), **settings}}
    with aside(old, unless=lambda: any(out.glob(_RESULTS[kind]))):
        code = run_command(command, {HOOK: json.dumps(orders)})
        watched = any(out.glob(_RESULTS[kind]))
    if watched:
        return code, out
    if code:
        raise typer.Exit(code)
    raise CommandFailed(
        f"{command[0]!r} ended and was not watched: no Python process of it called a torch module, or its output above says why."
    )

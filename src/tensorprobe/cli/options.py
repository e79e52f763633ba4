"""What the commands share: options that mean the same, options made from a table of settings, output, a progress bar.

An option that means the same has the same name in every command. Spellings of earlier versions still work, and are hidden.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from tensorprobe.errors import SettingsError, TensorprobeError
from tensorprobe.report.forms import FORMS, Answer, Wanted, names_for, parse_forms
from tensorprobe.settings import Settings
from tensorprobe.text import message

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

LONG_S = 2.0
"""A progress bar appears after this time."""

_MOST_COMPLETIONS = 200
OUT = ("-o", "--out")
JSON: Any = typer.Option(False, "--json", help="Print the result as JSON.")
LIMIT: Any = typer.Option(10, min=1, metavar="N", help="Maximum lines per list.")
STEP: Any = typer.Option(None, metavar="N", help="Only this step.")
RANK: Any = typer.Option(None, metavar="N", help="Only this rank.")
OLD_OUTPUT: Any = typer.Option(None, "--output", hidden=True)


def complete_call(context: typer.Context, incomplete: str) -> list[str]:
    """Return names of calls for the shell, of the run that stands before; none when there is no such run."""
    from tensorprobe.record.reader import open_run

    try:
        run = open_run(context.params.get("candidate") or context.params["run"])
        names = (name for place in run.segments()[:1] for name in run.names(*place, on_damage="skip"))
        return list(dict.fromkeys(name for name in names if name.startswith(incomplete)))[:_MOST_COMPLETIONS]
    except (TensorprobeError, OSError, KeyError):
        return []


def option(table: type[Settings], name: str, *flags: str, **extra: Any) -> Any:
    """Return the option for a setting: its default and its help are those of the table."""
    declared = table.declared()[name]
    if not isinstance(declared.default, bool) and name != "stacks":
        extra.setdefault("metavar", name.upper().removesuffix("S") if extra.get("default") == [] else name.upper())
    return typer.Option(extra.pop("default", declared.default), *flags, help=declared.help, **extra)


def given(table: type[Settings], parameters: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return the settings that a command was given: its parameters that `table` has, and `others`, by their names in it.

    What was not given is left out, so that the default of the table holds.
    """
    held = {name: parameters[name] for name in table.declared() if name in parameters} | others
    return {name: value for name, value in held.items() if value not in (None, [], ("", ""))}


def format_option(summary: type, files: str = "needs FILE") -> Any:
    """Return `--format NAME[=FILE]`; its help lists the forms for that kind of summary, and says what is special about files."""
    names, in_files = names_for(summary, (False,)), names_for(summary, (True,))
    names += f"; {in_files} {files}" if in_files else ""
    return typer.Option(
        [],
        "--format",
        metavar="NAME[=FILE]",
        help=f"Output format: {names}. Printed, or written to FILE.",
    )


def either(new: T | None, old: T | None, name: str) -> T | None:
    """Return the value of an option that has an old spelling. SettingsError when both are given."""
    if new is not None and old is not None:
        raise SettingsError(f"{name} is given twice, once in its old spelling.")
    return old if new is None else new


def show(
    result: Answer, forms: Sequence[Wanted], limit: int, *, notices: Sequence[str] = (), code: int = 0
) -> NoReturn:
    """Write the files that were asked for, print the result, and end with `code`, or with the result's if that is 0."""
    for notice in notices:
        typer.echo(message(notice), err=True)
    for wanted in forms:
        if wanted.file is not None:
            result.save(wanted.file, wanted.name, limit=limit)
    printed = [wanted.name for wanted in forms if wanted.file is None and not FORMS[wanted.name].is_file]
    typer.echo(result.render(printed[0] if printed else "text", limit=limit))
    raise typer.Exit(code or result.exit_code)


def read_forms(given: list[str], as_json: bool, summary: type) -> list[Wanted]:
    """Return the forms that `--format` and `--json` ask for, checked before any work begins."""
    return parse_forms([*given, *(["json"] if as_json and "json" not in given else [])], summary)


class Bar:
    """A progress bar on stderr. It appears after two seconds, and moves when there is something to count."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._done = 0
        self._total: int | None = None
        self._shown: Progress | None = None
        self._timer = threading.Timer(LONG_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, count: int = 1) -> None:
        """Count what was done since the last time."""
        self.reach(self._done + count, self._total)

    def expect(self, total: int) -> None:
        """Say how much there is to do, as far as that is known: the bar estimates the time from it."""
        self.reach(self._done, total or None)

    def reach(self, done: int, total: int | None) -> None:
        """Show how much is done, and of how much where that is known."""
        self._done, self._total = done, total
        if self._shown is not None:
            self._shown.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Remove the bar."""
        self._timer.cancel()
        self._timer.join()
        if self._shown is not None:
            self._shown.stop()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class Left(ProgressColumn):
            """An estimate."""

            def render(self, task: Task) -> Text:
                """Return how long it will take, as far as that is known."""
                left = task.time_remaining
                return Text("" if left is None else f"about {timedelta(seconds=math.ceil(left))} left")

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}"), TimeElapsedColumn())
        shown = Progress(*columns, Left(), console=Console(file=sys.__stderr__), transient=True)
        self._task = shown.add_task(self._doing, total=self._total, completed=self._done)
        shown.start()
        self._shown = shown


@contextmanager
def progress(doing: str) -> Iterator[Bar | None]:
    """Show a progress bar while the block runs, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = Bar(doing)
    try:
        yield bar
    finally:
        bar.close()

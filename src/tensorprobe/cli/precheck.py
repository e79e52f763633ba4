"""`tensorprobe precheck`: each call of a run alone, on the device and on a reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from tensorprobe.checks.settings import PrecheckSettings
from tensorprobe.cli.options import (
    JSON,
    LIMIT,
    OLD_OUTPUT,
    OUT,
    either,
    format_option,
    given,
    option,
    progress,
    read_forms,
    show,
)
from tensorprobe.errors import SettingsError
from tensorprobe.model.precheck import Precheck
from tensorprobe.report.forms import FORMS
from tensorprobe.text import plain, shell


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="precheck")(precheck)


def precheck(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run, or a dump of another tool."),
    device: str | None = option(PrecheckSettings, "device"),
    data: str = option(PrecheckSettings, "data"),
    call: list[str] = option(PrecheckSettings, "calls", "--call", default=[]),
    standard: str = option(PrecheckSettings, "standard"),
    hard: bool = option(PrecheckSettings, "hard", "--hard"),
    imports: list[str] = option(PrecheckSettings, "imports", "--import", default=[]),
    steps: str | None = option(PrecheckSettings, "steps"),
    ranks: str | None = option(PrecheckSettings, "ranks"),
    jobs: int = option(PrecheckSettings, "jobs", metavar="N"),
    time_limit: float = option(PrecheckSettings, "time_limit_s", "--time-limit", metavar="SECONDS"),
    max_replay_bytes: str | None = option(PrecheckSettings, "max_replay_bytes", metavar="SIZE"),
    out: Path | None = typer.Option(
        None, *OUT, metavar="FOLDER", help="Folder for the result: two tables, summary.json, saved failures."
    ),
    output: str | None = OLD_OUTPUT,
    resume: Path | None = typer.Option(
        None, "--resume", metavar="FOLDER", help="Continue a precheck that was stopped in this output folder."
    ),
    save_failures: bool = option(PrecheckSettings, "save_failures", "--save-failures"),
    dedupe: bool = option(PrecheckSettings, "dedupe", "--dedupe/--no-dedupe"),
    backward: bool = option(PrecheckSettings, "backward", "--backward/--no-backward"),
    form: list[str] = format_option(Precheck),
    as_json: bool = JSON,
    limit: int = LIMIT,
) -> None:
    """Run each call of a run on its own and check the result.

    Each call of a recorded step runs on the device and on the CPU in higher precision, and the difference is judged. Exit
    code 0: all calls pass. 1: a call fails. 2: no call could be checked.
    """
    settings = given(PrecheckSettings, locals(), calls=call, time_limit_s=time_limit)
    from tensorprobe.checks.runner import precheck as check_run

    if imports and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # the processes that run calls look where this one does
    folder = either(out, None if output is None else Path(output), "--out")
    run_checks(check_run, run, settings, Wanted(Precheck, form, as_json, limit), folder, resume)


class Wanted(NamedTuple):
    """How the result is shown."""

    summary: type
    forms: list[str]
    as_json: bool
    limit: int


def run_checks(
    check_run: Callable[..., Any],
    run: Path,
    settings: dict[str, Any],
    wanted: Wanted,
    out: Path | None,
    resume: Path | None,
) -> NoReturn:
    """Check the calls of a run, show the result, and end with its exit code."""
    if resume is not None and out not in (None, resume):
        raise SettingsError(f"--resume {plain(resume)} continues in that folder: leave out -o {plain(out)}.")
    folder = resume or out
    forms = read_forms(wanted.forms, wanted.as_json, wanted.summary)
    for each in forms:
        if FORMS[each.name].is_file and each.file is None:
            raise SettingsError(
                f"--format {each.name} needs a file: --format {each.name}=FILE. "
                "With -o FOLDER both tables and the page are written anyway."
            )
    try:
        with progress("checking calls") as bar:
            reach = None if bar is None else bar.reach
            result = check_run(run, out=folder, resume=resume is not None, progress=reach, **settings)
    except KeyboardInterrupt:
        if folder is not None:
            typer.echo(f"Stopped. To continue, run the same command with --resume {shell(folder)}", err=True)
        raise
    show(result, forms, wanted.limit)

"""`tensorprobe precheck`: each call of a run alone, on the device and on a reference."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import typer

from tensorprobe.errors import SettingsError

_LONG_S = 1.0
"""A bar appears after this time: what is over sooner needs none."""


class Data(str, Enum):
    """What the calls are given."""

    random = "random"
    real = "real"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="precheck")(precheck)


def precheck(
    run: Path = typer.Argument(help="The folder of the run, or a dump of another tool."),
    device: str = typer.Option("cpu", help="The device under test, as torch names it: cpu, cuda, npu:1."),
    data: Data = typer.Option(
        Data.random, help="random, from the recorded dtypes, shapes and ranges, or real: the recorded values."
    ),
    call: list[str] = typer.Option(
        [], "--call", help="Only this call: Functional.conv2d.1, or a glob: '*.linear.*'. May be given several times."
    ),
    standard: str = typer.Option("noise-aware", help="noise-aware, seed, binary, absolute or ulp."),
    hard: bool = typer.Option(
        False, "--hard", help="Also inputs at the edges: zeros, subnormals, near overflow, ties, not contiguous."
    ),
    steps: str | None = typer.Option(None, help="These steps: 0,2-4; the first when not given."),
    ranks: str | None = typer.Option(None, help="Only these ranks: 0,2-4."),
    jobs: int = typer.Option(1, min=0, help="Processes that share the calls; 0 runs them in this one, unprotected."),
    time_limit: float = typer.Option(60.0, help="Seconds after which a call that has not ended has failed."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Folder for the result: two tables, summary.json, saved failures."
    ),
    resume: Path | None = typer.Option(None, "--resume", help="Continue what was stopped in this output folder."),
    save_failures: bool = typer.Option(
        False, "--save-failures", help="Save each failing call with a script that runs it alone."
    ),
    dedupe: bool = typer.Option(True, "--dedupe/--no-dedupe", help="Run calls that are equal once."),
    backward: bool = typer.Option(True, "--backward/--no-backward", help="Also check the gradients."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    limit: int = typer.Option(10, min=1, help="At most so many lines in a list."),
) -> None:
    """Run each call of a recorded step alone, on a device and on the CPU in higher precision, and judge it.

    Exit code 0: nothing failed. 1: something did. 2: nothing could be checked.
    """
    from tensorprobe.checks.runner import precheck as check_run
    from tensorprobe.report.precheck_text import render_precheck

    if resume is not None and output not in (None, resume):
        raise SettingsError(f"--resume {resume} goes on in that folder: leave out -o {output}.")
    out = resume or output
    try:
        with _progress() as progress:
            result = check_run(
                run,
                device=device,
                data=data.value,
                standard=standard,
                calls=call or None,
                steps=steps,
                ranks=ranks,
                dedupe=dedupe,
                backward=backward,
                hard=hard,
                jobs=jobs,
                time_limit_s=time_limit,
                out=out,
                resume=resume is not None,
                save_failures=save_failures,
                progress=progress,
            )
    except KeyboardInterrupt:
        if out is not None:
            typer.echo(f"Stopped. Go on with the same command and --resume {shlex.quote(str(out))}", err=True)
        raise
    typer.echo(result.to_json() if as_json else render_precheck(result.summary, replays=result.replays, limit=limit))
    raise typer.Exit(result.exit_code)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=None, visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - started > _LONG_S)

        yield show

"""`tensorprobe export`: the tensors of a run as files that other programs read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tensorprobe.record.run import Run

_LONG = 2000
"""An export of fewer calls is over before a bar is of use."""


class Form(str, Enum):
    """What a run can be exported to."""

    npy = "npy"
    safetensors = "safetensors"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="export")(export)


def export(
    run: Path = typer.Argument(help="The folder of the run."),
    folder: Path = typer.Argument(help="Where to write: a new or empty folder."),
    to: Form = typer.Option(..., help="npy: a file for each tensor. safetensors: a file for each step and rank."),
    step: int | None = typer.Option(None, help="Only this step."),
    rank: int | None = typer.Option(None, help="Only this rank."),
    call: str | None = typer.Option(
        None, help="Only calls of this name: Functional.conv2d.1, or a glob: '*.linear.*'."
    ),
) -> None:
    """Write the tensors of a run as .npy or .safetensors files."""
    from tensorprobe.record.export import export_run
    from tensorprobe.record.reader import open_run
    from tensorprobe.text import counted, plain, size

    opened = open_run(run)
    with _progress(opened, step, rank) as progress:
        done = export_run(opened, folder, to=to.value, step=step, rank=rank, call=call, progress=progress)
    typer.echo(
        f"{counted(done.tensors, 'tensor')}, {size(done.size_bytes)}, in {counted(done.files, 'file')}: {done.folder}"
    )
    for reason, count in done.left_out.items():
        typer.echo(f"{counted(count, 'slot')} left out: {plain(reason)}")
    if done.damaged_lines:
        typer.echo(
            f"{counted(done.damaged_lines, 'damaged line')} left out. See them: tensorprobe inspect {run} --verify"
        )


@contextmanager
def _progress(run: Run, step: int | None, rank: int | None) -> Iterator[Callable[[], None] | None]:
    """A bar on stderr, on a terminal and for long exports only; it is told of each call that is done."""
    total = (
        sum(len(run.segment(*key).index().entries) for key in run.segments(step, rank)) if sys.stderr.isatty() else 0
    )
    if total < _LONG:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("exporting", total=total)
        yield lambda: bar.advance(task)

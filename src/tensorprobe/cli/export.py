"""`tensorprobe export`: the tensors of a run as files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tensorprobe.cli.options import JSON, OUT, RANK, STEP, either, progress
from tensorprobe.errors import SettingsError
from tensorprobe.settings import one_of

_FORMS = ("npy", "safetensors", "tpz")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="export")(export)


def export(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run."),
    folder: Path | None = typer.Argument(None, hidden=True),
    to: str = typer.Option(
        ...,
        metavar="FORM",
        help="npy: a file for each tensor. safetensors: a file for each step and rank. tpz: one small file without values.",
    ),
    out: Path | None = typer.Option(
        None, *OUT, metavar="FOLDER", help="A new or empty folder for the files; the file, for tpz. Required."
    ),
    step: int | None = STEP,
    rank: int | None = RANK,
    call: str | None = typer.Option(
        None, metavar="CALL", help="Only calls of this name: Functional.conv2d.1, or a glob such as '*.linear.*'."
    ),
    as_json: bool = JSON,
) -> None:
    """Write tensors as .npy or .safetensors files."""
    from tensorprobe.record.export import export_run
    from tensorprobe.record.reader import open_run
    from tensorprobe.standard_json import encode
    from tensorprobe.text import counted, plain, shell, size

    target = either(out, folder, "--out")
    if target is None:
        raise SettingsError("the folder for the files is missing: add -o FOLDER.")
    chosen: Any = one_of(*_FORMS)(to, "--to")
    opened = open_run(run)
    if chosen == "tpz":
        from tensorprobe.record.sealed import seal_run

        written = seal_run(opened, target)
        typer.echo(
            encode({"file": str(target), "size_bytes": written}) if as_json else f"{size(written)}: {plain(target)}"
        )
        return
    with progress("exporting calls") as bar:
        if bar is not None:
            bar.expect(sum(part.recorded for part in opened.coverage.values()))
        done = export_run(opened, target, to=chosen, step=step, rank=rank, call=call, progress=bar)
    if as_json:
        facts = ("files", "tensors", "size_bytes", "damaged_lines")
        left_out = dict(done.left_out)
        typer.echo(
            encode({"folder": str(done.folder), **{key: getattr(done, key) for key in facts}, "left_out": left_out})
        )
        return
    typer.echo(
        f"{counted(done.tensors, 'tensor')}, {size(done.size_bytes)}, in {counted(done.files, 'file')}: {plain(done.folder)}"
    )
    for reason, count in done.left_out.items():
        typer.echo(f"{counted(count, 'slot')} left out: {plain(reason)}")
    if done.damaged_lines:
        typer.echo(
            f"{counted(done.damaged_lines, 'damaged line')} left out. Next:   tensorprobe inspect {shell(run)} --verify"
        )

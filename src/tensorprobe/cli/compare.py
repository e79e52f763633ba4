"""`tensorprobe compare`: where two runs part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tensorprobe.errors import SettingsError

if TYPE_CHECKING:
    from tensorprobe.engine import Result

_LONG_S = 1.0
"""A bar appears after this time: what is over sooner needs none."""


class Form(str, Enum):
    """What is printed, or, for the last three, which table is written into the output folder."""

    text = "text"
    json = "json"
    md = "md"
    junit = "junit"
    github = "github"
    csv = "csv"
    parquet = "parquet"
    xlsx = "xlsx"


_TABLES = (Form.csv, Form.parquet, Form.xlsx)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="compare")(compare)


def compare(
    baseline: str = typer.Argument(help="The run that is trusted."),
    candidate: str = typer.Argument(help="The run under test."),
    output: str | None = typer.Option(
        None, "--output", "-o", help="Folder for the result: a row for each pair of tensors, summary.json, advisor.txt."
    ),
    policy: str = typer.Option(
        "noise-aware", help="noise-aware, bitwise, seed-2023, seed-2024, or a .toml file with rules of your own."
    ),
    steps: str | None = typer.Option(None, help="Only these steps: 0,2-4."),
    ranks: str | None = typer.Option(None, help="Only these ranks: 0,2-4."),
    form: list[Form] = typer.Option(
        [],
        "--format",
        help="text, json, md, junit or github is printed; csv, parquet or xlsx is the table in the output folder. May be repeated.",
    ),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
    map_file: Path | None = typer.Option(None, "--map", help="A file with pairs of names that belong together."),
    strip_prefix: str | None = typer.Option(None, help="Take this beginning off module paths: module."),
    fuzzy: bool = typer.Option(False, "--fuzzy", help="Pair calls of one op in their order, whatever their numbers."),
    threads: int | None = typer.Option(
        None, min=1, help="Threads that measure tensors; all processors when not given."
    ),
    jobs: int = typer.Option(1, min=1, help="Processes; each takes whole ranks."),
    limit: int = typer.Option(10, min=1, help="At most so many lines in a list."),
) -> None:
    """Compare two runs call by call, and name the first call where they part.

    Exit code 0: they agree. 1: they diverge. 2: they cannot be compared.
    """
    from tensorprobe.engine import compare as compare_runs

    tables = [each for each in form if each in _TABLES]
    if tables and output is None:
        raise SettingsError(f"--format {tables[0].value} is a file: say where with -o FOLDER.")
    with _progress() as progress:
        result = compare_runs(
            baseline,
            candidate,
            out=output,
            policy=policy,
            steps=steps,
            ranks=ranks,
            map=map_file,
            strip_prefix=strip_prefix,
            fuzzy=fuzzy,
            threads=threads,
            jobs=jobs,
            table="csv" if Form.csv in tables and Form.parquet not in tables else "parquet",
            keep_rows=False,
            progress=progress,
        )
    _write_workbook(result, output, Form.xlsx in tables)
    printed = Form.json if as_json else next((each for each in reversed(form) if each not in _TABLES), Form.text)
    typer.echo(_render(result, printed, limit))
    raise typer.Exit(result.exit_code)


def _render(result: Result, form: Form, limit: int) -> str:
    if form is Form.json:
        return result.to_json()
    if form is Form.md:
        from tensorprobe.report.markdown import render_markdown

        return render_markdown(result.summary, limit=limit)
    if form is Form.junit:
        from tensorprobe.report.junit import render_junit

        return render_junit(result.summary)
    if form is Form.github:
        from tensorprobe.report.github import render_github

        return render_github(result.summary, limit=limit, root=str(Path.cwd()))
    from tensorprobe.report.compare_text import render_comparison

    return render_comparison(result.summary, limit=limit)


def _write_workbook(result: Result, output: str | None, wanted: bool) -> None:
    if not wanted or output is None:
        return
    from tensorprobe.report.xlsx import write_xlsx

    written, left_out = write_xlsx(Path(output) / "result.xlsx", result.rows.batches(), full_table="result.parquet")
    if left_out:
        typer.echo(f"result.xlsx holds {written:,} rows; {left_out:,} more are in the table beside it.", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[int], None] | None]:
    """A count of pairs on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} calls"),
        TimeElapsedColumn(),
    )
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=None, visible=False)

        def advance(count: int) -> None:
            bar.update(task, advance=count, visible=time.monotonic() - started > _LONG_S)

        yield advance

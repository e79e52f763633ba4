"""`tensorprobe compare`: where two runs part."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from tensorprobe.errors import SettingsError

if TYPE_CHECKING:
    from tensorprobe.engine import Result, ShardDone

_LONG_S = 1.0
"""A bar appears after this time: what is over sooner needs none."""
_SHOWN = 10


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


class Engine(str, Enum):
    """Where the ranks are compared."""

    local = "local"
    ray = "ray"


_TABLES = (Form.csv, Form.parquet, Form.xlsx)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="compare")(compare)


def compare(
    baseline: str = typer.Argument(help="The run that is trusted: a folder or a URL."),
    candidate: str = typer.Argument(help="The run under test."),
    output: str | None = typer.Option(
        None,
        "--output",
        "-o",
        help="Folder or URL for the result: a row for each pair of tensors, summary.json, advisor.txt.",
    ),
    policy: str = typer.Option(
        "noise-aware", help="noise-aware, bitwise, seed-2023, seed-2024, or a .toml file with rules of your own."
    ),
    steps: str | None = typer.Option(None, help="Only these steps: 0,2-4."),
    ranks: str | None = typer.Option(None, help="Only these ranks: 0,2-4."),
    form: list[Form] = typer.Option(
        [],
        "--format",
        help="text, json, md, junit or github is printed; csv, parquet or xlsx is the table in the output folder.",
    ),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
    map_file: Path | None = typer.Option(None, "--map", help="A file with pairs of names that belong together."),
    strip_prefix: str | None = typer.Option(None, help="Take this beginning off module paths: module."),
    fuzzy: bool = typer.Option(False, "--fuzzy", help="Pair calls of one op in their order, whatever their numbers."),
    threads: int | None = typer.Option(
        None, min=1, help="Threads that measure the tensors of a rank; all processors, shared out, when not given."
    ),
    jobs: int = typer.Option(1, min=1, help="Processes on this machine; each takes whole ranks."),
    engine: Engine = typer.Option(Engine.local, help="local, or ray: send the ranks to an existing Ray cluster."),
    address: str | None = typer.Option(
        None, help="Of the Ray cluster: auto (when not given), ray://host:port, or local for one on this machine."
    ),
    shard: str | None = typer.Option(
        None, metavar="I/N", help="Do only part I of N, into the output folder; 'tensorprobe merge' gives the answer."
    ),
    limit: int = typer.Option(10, min=1, help="At most so many lines in a list."),
) -> None:
    """Compare two runs call by call, and name the first call where they part.

    Exit code 0: they agree. 1: they diverge. 2: they cannot be compared.
    """
    from tensorprobe.engine import compare as compare_runs
    from tensorprobe.engine import compare_shard

    tables = [each for each in form if each in _TABLES]
    if tables and output is None:
        raise SettingsError(f"--format {tables[0].value} is a file: say where with -o FOLDER.")
    settings: dict[str, Any] = {
        "policy": policy,
        "steps": steps,
        "ranks": ranks,
        "map": map_file,
        "strip_prefix": strip_prefix,
        "fuzzy": fuzzy,
        "threads": threads,
        "jobs": jobs,
        "engine": engine.value,
        "address": address,
        "table": "csv" if Form.csv in tables and Form.parquet not in tables else "parquet",
        "workbook": Form.xlsx in tables,
    }
    if shard is not None:
        folder = _demand_shard_folder(output, form, as_json)
        with _progress() as progress:
            done = compare_shard(baseline, candidate, shard=shard, out=folder, progress=progress, **settings)
        typer.echo(_shard_text(done))
        return
    with _progress() as progress:
        result = compare_runs(baseline, candidate, out=output, keep_rows=False, progress=progress, **settings)
    show(result, chosen_form(form, as_json), limit)


def chosen_form(form: list[Form], as_json: bool) -> Form:
    """What is printed: the last form asked for that is not a file."""
    return Form.json if as_json else next((each for each in reversed(form) if each not in _TABLES), Form.text)


def show(result: Result, form: Form, limit: int) -> NoReturn:
    """Print the result and end with its exit code."""
    for notice in result.notices:
        typer.echo(notice, err=True)
    typer.echo(_render(result, form, limit))
    raise typer.Exit(result.exit_code)


def _demand_shard_folder(output: str | None, form: list[Form], as_json: bool) -> str:
    if output is None:
        raise SettingsError("--shard leaves its part in a folder that all shards share: say where with -o FOLDER.")
    if as_json or any(each not in _TABLES for each in form):
        raise SettingsError(
            "a shard has no answer to print: leave out --json and --format here, and pass them to 'tensorprobe merge'."
        )
    return output


def _shard_text(done: ShardDone) -> str:
    ranks = f"rank {', '.join(map(str, done.ranks))}" if done.ranks else "no rank"
    lines = [
        f"SHARD {done.number} of {done.of}  {ranks} of {done.all_ranks:,} in all; {done.pairs:,} pairs of calls compared"
    ]
    merge = f"tensorprobe merge {shlex.quote(done.output)}"
    if done.missing:
        shown = ", ".join(f"{each}/{done.of}" for each in done.missing[:_SHOWN])
        more = f" and {len(done.missing) - _SHOWN:,} more" if len(done.missing) > _SHOWN else ""
        lines.append(f"Still missing: {shown}{more}. Then:   {merge}")
    else:
        lines.append(f"All shards are there:   {merge}")
    return "\n".join(lines)


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

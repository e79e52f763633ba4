"""`tensorprobe compare` and `tensorprobe merge`: where two runs part ways, at once or from shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

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
from tensorprobe.engine.remote import local_path
from tensorprobe.engine.settings import CompareSettings, TableForm
from tensorprobe.errors import SettingsError
from tensorprobe.model.comparison import Comparison
from tensorprobe.report.forms import FORMS, Wanted
from tensorprobe.text import few, shell

if TYPE_CHECKING:
    from tensorprobe.engine import ShardDone


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(name="compare")(compare)
    app.command(name="merge")(merge)


def compare(
    baseline: str = typer.Argument(metavar="BASELINE", help="The run that is trusted: a folder or a URL."),
    candidate: str = typer.Argument(metavar="CANDIDATE", help="The run under test: a folder or a URL."),
    out: str | None = typer.Option(
        None,
        *OUT,
        metavar="FOLDER",
        help="Folder or URL for the result: a table with a row for each pair of tensors, summary.json, advisor.txt,"
        " and the page report.html.",
    ),
    output: str | None = OLD_OUTPUT,
    policy: str = option(CompareSettings, "policy"),
    steps: str | None = option(CompareSettings, "steps"),
    ranks: str | None = option(CompareSettings, "ranks"),
    phase: list[str] = option(CompareSettings, "phases", "--phase", default=[]),
    form: list[str] = format_option(Comparison, "without FILE is the table or page in the output folder"),
    html: Path | None = typer.Option(None, "--html", metavar="FILE", help="Write the page: one file, for a browser."),
    as_json: bool = JSON,
    map_file: str | None = option(CompareSettings, "map", "--map", metavar="FILE"),
    noise: list[str] = option(CompareSettings, "noise", "--noise", default=[], metavar="RUN"),
    suggest_map: bool = typer.Option(
        False,
        "--suggest-map",
        help="Print a map of the modules that have another name in the candidate; compare nothing.",
    ),
    strip_prefix: str | None = option(CompareSettings, "strip_prefix", metavar="PREFIX"),
    fuzzy: bool = option(CompareSettings, "fuzzy", "--fuzzy"),
    strict: bool = option(CompareSettings, "strict", "--strict"),
    prove: str = option(CompareSettings, "prove"),
    threads: int | None = option(CompareSettings, "threads", metavar="N"),
    jobs: int = option(CompareSettings, "jobs", metavar="N"),
    engine: str = option(CompareSettings, "engine"),
    address: str | None = option(CompareSettings, "address"),
    shard: str | None = typer.Option(
        None, metavar="I/N", help="Do only part I of N, into the output folder. 'tensorprobe merge' gives the answer."
    ),
    limit: int = LIMIT,
) -> None:
    """Find the first call where two runs part ways.

    Exit code 0: they agree. 1: they diverge. 2: they cannot be compared, or one did not finish and the rest agrees.
    """
    settings = given(CompareSettings, locals(), phases=phase, map=map_file)
    from tensorprobe.engine import compare as compare_runs
    from tensorprobe.engine import compare_shard
    from tensorprobe.engine import suggest_map as suggest_names

    if suggest_map:
        return typer.echo(suggest_names(baseline, candidate, steps=steps, ranks=ranks), nl=False)
    folder = either(out, output, "--out")
    forms = read_forms([*form, *([f"html={html}"] if html is not None else [])], as_json, Comparison)
    tables = _tables(forms)
    table, beside = _place_tables(tables, folder, shard)
    forms += beside
    settings |= {"table": table, "workbook": "xlsx" in tables}
    with progress("comparing calls") as bar:
        if shard is None:
            keep_rows = any(FORMS[each.name].is_file for each in forms)
            result = compare_runs(baseline, candidate, out=folder, progress=bar, keep_rows=keep_rows, **settings)
        else:
            place = _demand_shard_folder(folder, forms, settings.pop("strict"))
            done = compare_shard(baseline, candidate, shard=shard, out=place, progress=bar, **settings)
    if shard is not None:
        return typer.echo(_shard_text(done))
    show(result, forms, limit, notices=result.notices)


def merge(
    folder: str = typer.Argument(metavar="FOLDER", help="The output folder or URL of the shards."),
    form: list[str] = format_option(Comparison),
    as_json: bool = JSON,
    limit: int = LIMIT,
) -> None:
    """Merge the shards of 'compare --shard'.

    The answer and the files are the same as those of one comparison. Exit code 0: the runs agree. 1: they diverge. 2: a
    shard is missing, or the shards do not belong together.
    """
    from tensorprobe.engine import merge_shards

    forms = read_forms(form, as_json, Comparison)
    if tables := _tables(forms):
        raise SettingsError(
            f"--format {tables[0]} needs a file here: --format {tables[0]}=FILE.\n"
            "  The table in the output folder has the form that was given to 'compare --shard'."
        )
    with progress("merging shards"):
        result = merge_shards(folder)
    show(result, forms, limit, notices=result.notices)


def _tables(forms: list[Wanted]) -> list[str]:
    """Return the forms that are files in the output folder."""
    return [each.name for each in forms if each.file is None and FORMS[each.name].is_file]


def _place_tables(tables: list[str], folder: str | None, shard: str | None) -> tuple[TableForm, list[Wanted]]:
    """Return the form of the table, and the forms that are written beside it once the comparison is done."""
    if tables and folder is None:
        raise SettingsError(f"--format {tables[0]} writes a file: add -o FOLDER, or --format {tables[0]}=FILE.")
    table: TableForm = "csv" if "csv" in tables and "parquet" not in tables else "parquet"
    added = [name for name in dict.fromkeys(tables) if name not in (table, "xlsx", "html")]
    place = None if folder is None or shard is not None else local_path(folder)
    if added and place is None:
        raise SettingsError(f"--format {added[0]} needs a file here: --format {added[0]}=FILE.")
    return table, [Wanted(name, place / f"result.{name}") for name in added if place is not None]


def _demand_shard_folder(folder: str | None, forms: list[Wanted], strict: bool) -> str:
    if strict:
        raise SettingsError("--strict is not available with --shard: no shard knows the structure of the others.")
    if folder is None:
        raise SettingsError("--shard writes its part into a folder that all shards share: add -o FOLDER.")
    if any(each.file is not None or not FORMS[each.name].is_file for each in forms):
        raise SettingsError(
            "a shard has no answer to print: leave out --json and --format here, and pass them to 'tensorprobe merge'."
        )
    return folder


def _shard_text(done: ShardDone) -> str:
    ranks = f"rank {', '.join(map(str, done.ranks))}" if done.ranks else "no rank"
    lines = [f"SHARD {done.number} of {done.of}  {ranks} of {done.all_ranks:,}; {done.pairs:,} pairs of calls compared"]
    merge_command = f"tensorprobe merge {shell(done.output)}"
    if done.missing:
        missing = few([f"{each}/{done.of}" for each in done.missing], 10)
        lines.append(f"Still missing: {missing}. Then:   {merge_command}")
    else:
        lines.append(f"All shards are done. Next:   {merge_command}")
    return "\n".join(lines)

"""`tensorprobe report`: the page of a result or of a run, as one file."""

from __future__ import annotations

from pathlib import Path

import typer

from tensorprobe.cli.options import OUT, either, progress
from tensorprobe.files import replace_file, writing


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="report")(report)


def report(
    path: Path = typer.Argument(
        metavar="RESULT", help="The folder of a result (compare, precheck, audit, online, overflow), or of a run."
    ),
    out: Path | None = typer.Option(
        None,
        *OUT,
        metavar="FILE",
        help="The file to write. Default: report.html in the folder of the result.",
    ),
    html: Path | None = typer.Option(None, "--html", hidden=True),
    full: bool = typer.Option(False, "--full", help="Put every row and figure into the file, however large it gets."),
    no_source: bool = typer.Option(
        False, "--no-source", help="Leave out lines of the program, arguments and paths, for sharing."
    ),
) -> None:
    """Write the page of a result: one HTML file for a browser.

    It needs no server and no network, nor the runs of the result. The page of a run is written to report.html in the current folder.
    """
    from tensorprobe.cli.results import folder_of, is_result, open_result, page_of
    from tensorprobe.report.page.html import to_html
    from tensorprobe.text import plain, size

    held = open_result(path)
    folder = folder_of(path)
    target = either(out, html, "--out") or (folder / "report.html" if is_result(folder) else Path("report.html"))
    with progress("making the page"):
        page = page_of(held, full=full, source=not no_source)
        text = to_html(page).encode()
    with writing(target):
        replace_file(target, text)
    if page.left_out:
        typer.echo(f"{page.left_out} All of them: --full", err=True)
    typer.echo(f"Page: {plain(target)} ({size(len(text))})")

"""`tensorprobe diff`: the tensors of one call in two runs."""

from __future__ import annotations

import typer

from tensorprobe.cli.options import JSON, RANK, STEP, complete_call, option, progress
from tensorprobe.engine.settings import CompareSettings


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="diff")(diff)


def diff(
    baseline: str = typer.Argument(metavar="BASELINE", help="The run that is trusted: a folder or a URL."),
    candidate: str = typer.Argument(metavar="CANDIDATE", help="The run under test: a folder or a URL."),
    call: str = typer.Argument(
        metavar="CALL",
        autocompletion=complete_call,
        help="A call: its name, the start of it, a glob, a module path, or module:PATH.",
    ),
    slot: str | None = typer.Option(None, metavar="SLOT", help="This tensor of the call: output.0, input.1."),
    by: str | None = typer.Option(None, metavar="AXIS", help="Show the error along this axis: -1, 0, rows, heads."),
    step: int | None = STEP,
    rank: int | None = RANK,
    map_file: str | None = option(CompareSettings, "map", "--map", metavar="FILE"),
    strip_prefix: str | None = option(CompareSettings, "strip_prefix", metavar="PREFIX"),
    fuzzy: bool = option(CompareSettings, "fuzzy", "--fuzzy"),
    limit: int = typer.Option(20, min=1, metavar="N", help="Maximum lines per list."),
    as_json: bool = JSON,
) -> None:
    """Show how the tensors of a call differ between two runs.

    For one call: statistics of both sides, the pattern of the error in words, the error along an axis, the worst elements,
    and histograms. For several calls: a line each. Exit code 0: all tensors are equal. 1: some differ. 2: there is no such call.
    """
    from tensorprobe.engine.call_diff import diff as diff_calls
    from tensorprobe.report.diff_text import choose_profile, render_diffs
    from tensorprobe.standard_json import encode

    with progress("comparing tensors"):
        found = diff_calls(
            baseline,
            candidate,
            call,
            slot=slot,
            step=step,
            rank=rank,
            map=map_file,
            strip_prefix=strip_prefix,
            fuzzy=fuzzy,
        )
    if by is not None:
        for each in found:
            if each.tensor is not None and each.tensor.profiles:
                choose_profile(each.tensor, by)
    typer.echo(encode(found) if as_json else render_diffs(found, runs=(baseline, candidate), by=by, limit=limit))
    raise typer.Exit(0 if all(line.equal for each in found for line in each.slots) else 1)

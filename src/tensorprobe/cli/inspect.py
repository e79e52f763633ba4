"""`tensorprobe inspect`: what a run holds, or one call of it with its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorprobe.cli.options import JSON, RANK, STEP, progress

if TYPE_CHECKING:
    from tensorprobe.record.run import Run
    from tensorprobe.record.stored import StoredCall


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="inspect")(inspect)


def inspect(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run."),
    call: str | None = typer.Argument(None, metavar="[CALL]", help="A call: Functional.conv2d.1, or its full name."),
    step: int | None = STEP,
    rank: int | None = RANK,
    slot: str | None = typer.Option(
        None, metavar="SLOT", help="Only this tensor of the call: input.0, output, parameters.weight."
    ),
    limit: int = typer.Option(20, min=1, metavar="N", help="Maximum lines per list."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte and check it against the format."),
    as_json: bool = JSON,
) -> None:
    """Show what a run or a call holds.

    For a run: steps, ranks, calls and coverage. For a call: stack, arguments, statistics and values. With --verify the
    exit code is 1 when something is damaged.
    """
    from tensorprobe.record.reader import open_run

    opened = open_run(run)
    if verify:
        _verify(opened, limit, as_json)
    elif call is not None:
        _show_calls(opened, opened.find(call, step=step, rank=rank), slot, limit, as_json)
    elif step is not None or rank is not None:
        _list_calls(opened, step, rank, limit, as_json)
    else:
        _show_run(opened, limit, as_json)


def _show_run(run: Run, limit: int, as_json: bool) -> None:
    from tensorprobe.record.overview import describe_run
    from tensorprobe.report.inspect import render_run

    overview = describe_run(run)
    typer.echo(_json(overview) if as_json else render_run(overview, limit=limit))


def _list_calls(run: Run, step: int | None, rank: int | None, limit: int, as_json: bool) -> None:
    from tensorprobe.record.overview import list_calls
    from tensorprobe.report.inspect import render_lines

    lines, total = list_calls(run, step, rank, limit=limit)
    typer.echo(_json({"total": total, "calls": lines}) if as_json else render_lines(lines, total, run=str(run.path)))


def _show_calls(run: Run, found: list[StoredCall], slot: str | None, limit: int, as_json: bool) -> None:
    """The calls in full when they are one op of one number; a list when the name fits several."""
    from tensorprobe.record.overview import describe_call, describe_line
    from tensorprobe.report.inspect import render_calls, render_lines

    shown = found[:limit]
    if len({(call.op, call.number) for call in found}) > 1:
        lines = [describe_line(call) for call in shown]
        typer.echo(
            _json({"total": len(found), "calls": lines})
            if as_json
            else render_lines(lines, len(found), run=str(run.path))
        )
        return
    views = [describe_call(run, call, slot=slot) for call in shown]
    if as_json:
        typer.echo(_json({"total": len(found), "calls": views}))
        return
    typer.echo(render_calls(views, len(found), run=str(run.path)))


def _verify(run: Run, limit: int, as_json: bool) -> None:
    from tensorprobe.record.check import verify_run
    from tensorprobe.report.inspect import render_verification

    with progress("verifying"):
        result = verify_run(run, data=True)
    problems = [str(problem) for problem in result.problems]
    facts: dict[str, Any] = {
        "calls": result.calls,
        "slots": result.slots,
        "bytes_hashed": result.bytes_hashed,
        "cut": result.cut,
    }
    if as_json:
        typer.echo(_json({"sound": result.sound, "problems": problems, **facts}))
    else:
        typer.echo(render_verification(problems, limit=limit, **facts))
    if not result.sound:
        raise typer.Exit(1)


def _json(value: object) -> str:
    from tensorprobe.standard_json import encode

    return encode(value)

"""`tensorprobe inspect`: what a run holds, or one call of it with its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorprobe.cli.options import JSON, RANK, STEP, complete_call, progress
from tensorprobe.errors import RunNotFound
from tensorprobe.model.call import PHASES
from tensorprobe.settings import one_of

if TYPE_CHECKING:
    from tensorprobe.record.run import Run
    from tensorprobe.record.stored import StoredCall


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="inspect")(inspect)


def inspect(
    run: Path = typer.Argument(metavar="RUN", help="The folder of a run, or of a result."),
    call: str | None = typer.Argument(
        None,
        metavar="[CALL|RUN]",
        autocompletion=complete_call,
        help="A call: its name, the start of it, a glob, a module path, or module:PATH. Or a second run, to show both.",
    ),
    step: int | None = STEP,
    rank: int | None = RANK,
    phase: str | None = typer.Option(None, metavar="PHASE", help=f"Only calls of this phase: {', '.join(PHASES)}."),
    slot: str | None = typer.Option(
        None, metavar="SLOT", help="Only this tensor of the call: input.0, output, parameters.weight."
    ),
    values: int = typer.Option(6, min=0, max=100_000, metavar="N", help="Show the first N values of each tensor."),
    limit: int = typer.Option(20, min=1, metavar="N", help="Maximum lines per list."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte and check it against the format."),
    as_json: bool = JSON,
) -> None:
    """Show what a run, a call or a result holds.

    For a run: steps, ranks, calls and coverage. For two runs: both, side by side. For a call: stack, arguments, statistics and
    values. For the result of a command: what it printed. With --verify the exit code is 1 when something is damaged.
    """
    from tensorprobe.cli.results import is_result, open_result
    from tensorprobe.record.reader import open_run

    if is_result(run):
        _show_result(open_result(run), limit, as_json)
        return
    opened = open_run(run) if phase is None else _of_phase(open_run(run), phase)
    if verify:
        _verify(opened, limit, as_json)
    elif call is not None and (second := _second_run(call)) is not None:
        _show_both(opened, second, limit, as_json)
    elif call is not None:
        _show_calls(opened, opened.find(call, step=step, rank=rank), slot, values, limit, as_json)
    elif step is not None or rank is not None or phase is not None:
        _list_calls(opened, step, rank, limit, as_json)
    else:
        _show_run(opened, limit, as_json)


def _of_phase(run: Run, phase: str) -> Run:
    from tensorprobe.record.phases import demand_calls, of_phases

    chosen = of_phases(run, (one_of(*PHASES)(phase, "--phase"),))
    demand_calls(chosen, (phase,))
    return chosen


def _second_run(name: str) -> Run | None:
    """Return the run of that path. None if there is none: it is the name of a call then, or of a module."""
    from tensorprobe.record.reader import open_run

    try:
        return open_run(name) if Path(name).exists() else None
    except RunNotFound:
        return None


def _show_run(run: Run, limit: int, as_json: bool) -> None:
    from tensorprobe.record.overview import describe_run
    from tensorprobe.report.inspect import render_run

    overview = describe_run(run)
    typer.echo(_json(overview) if as_json else render_run(overview, limit=limit))


def _show_result(result: Any, limit: int, as_json: bool) -> None:
    """Print the result of a command as the command did."""
    from tensorprobe.report.forms import Answer, render

    form = "json" if as_json else "text"
    typer.echo(result.render(form, limit=limit) if isinstance(result, Answer) else render(result, form, limit=limit))


def _show_both(baseline: Run, candidate: Run, limit: int, as_json: bool) -> None:
    """Print two runs side by side."""
    from tensorprobe.record.overview import count_ops, describe_run
    from tensorprobe.report.inspect import render_two_runs

    runs = (baseline, candidate)
    overviews = (describe_run(baseline), describe_run(candidate))
    ops = (count_ops(baseline), count_ops(candidate))
    if as_json:
        typer.echo(_json([{"run": overview, "ops": counts} for overview, counts in zip(overviews, ops, strict=True)]))
        return
    typer.echo(render_two_runs(overviews, ops, paths=(str(runs[0].path), str(runs[1].path)), limit=limit))


def _list_calls(run: Run, step: int | None, rank: int | None, limit: int, as_json: bool) -> None:
    from tensorprobe.record.overview import list_calls
    from tensorprobe.report.inspect import render_lines

    lines, total = list_calls(run, step, rank, limit=limit)
    typer.echo(_json({"total": total, "calls": lines}) if as_json else render_lines(lines, total, run=str(run.path)))


def _show_calls(run: Run, found: list[StoredCall], slot: str | None, values: int, limit: int, as_json: bool) -> None:
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
    views = [describe_call(run, call, slot=slot, values=values) for call in shown]
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

"""`tensorprobe capture`: record a script without changing it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any

import typer

from tensorprobe.cli.command import RunsCommand, aside, demand_dashes, run_command
from tensorprobe.cli.options import OUT, given, option
from tensorprobe.errors import CommandFailed, SettingsError, TensorprobeError
from tensorprobe.files import refusal
from tensorprobe.settings import one_of
from tensorprobe.taps.settings import CaptureSettings
from tensorprobe.text import message, plain, shell

_TICK_S = 0.05
"""Times of files are those of the last tick of the clock."""
_STEP_ON = {"optimizer": "optimizer", "forward": "forward", "manual": "call"}
_HOOK = "tensorprobe.inject.capture:begin"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="capture", cls=RunsCommand)(capture)


def capture(
    command: list[str] = typer.Argument(
        metavar="COMMAND...", help="The command to run, after --, e.g. -- python train.py --epochs 1"
    ),
    out: Path = typer.Option(..., *OUT, metavar="FOLDER", help="Folder for the run. It must not hold a run yet."),
    level: str = option(CaptureSettings, "level"),
    mode: str = option(CaptureSettings, "mode"),
    steps: str | None = option(CaptureSettings, "steps"),
    ranks: str | None = option(CaptureSettings, "ranks"),
    phase: list[str] = option(CaptureSettings, "phases", "--phase", default=[]),
    direction: list[str] = option(CaptureSettings, "directions", "--direction", default=[]),
    side: list[str] = option(CaptureSettings, "sides", "--side", default=[]),
    call: list[str] = option(CaptureSettings, "names", "--call", default=[]),
    name: list[str] = typer.Option([], "--name", hidden=True),
    span: tuple[str, str] = option(CaptureSettings, "span", "--span", default=("", ""), metavar="FIRST LAST"),
    op: list[str] = option(CaptureSettings, "ops", "--op", default=[]),
    module: list[str] = option(CaptureSettings, "modules", "--module", default=[]),
    inside: list[str] = option(CaptureSettings, "inside", "--inside", default=[]),
    floating_only: bool = option(CaptureSettings, "floating_only", "--floating-only"),
    max_bytes: str | None = option(CaptureSettings, "max_bytes", metavar="SIZE"),
    stacks: bool | None = option(CaptureSettings, "stacks", "--stacks/--no-stacks"),
    begin: str = typer.Option(
        "module",
        "--from",
        metavar="BEGIN",
        help="Where recording begins: at the first call of a `module`, or at the `start`, with the first call of torch.",
    ),
    step_on: str = typer.Option(
        "optimizer",
        "--step-on",
        metavar="EVENT",
        help="What ends a step: the `optimizer`; `forward`, the next call of the model, for inference: the prompt is step 0, each "
        "token another; or `manual`, a call of tensorprobe.active_probe().step().",
    ),
    repeat: int = typer.Option(
        1,
        metavar="N",
        min=1,
        max=100,
        help="Run the command N times, into FOLDER, FOLDER-2, …: see --noise of compare.",
    ),
    perturb: str | None = typer.Option(
        None,
        metavar="HOW",
        help="Change the repeated runs: `threads` (another number of them) or `ulp` (inputs and parameters of the first module by "
        "one unit in the last place).",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a run that is already in the folder."),
) -> None:
    """Record the PyTorch calls of a command.

    The script is not edited. Recording begins when it calls the first module (--from start: with the first call of torch),
    and a step ends with optimizer.step(). The exit code is that of the command; 2 when the command succeeded but nothing was
    recorded, or calls could not be recorded.
    """
    settings = given(
        *(CaptureSettings, locals()),
        phases=phase,
        directions=direction,
        sides=side,
        names=[*call, *name],
        ops=op,
        modules=module,
    )
    demand_dashes(command, sys.argv[1:])
    if begin not in ("start", "module"):
        raise SettingsError(f"--from is {begin!r}; expected 'start' or 'module'.")
    steps_by = _STEP_ON[one_of(*_STEP_ON)(step_on, "--step-on")]
    recording = {"begin": begin, "overwrite": overwrite, "steps_by": steps_by}
    raise typer.Exit(_run_repeated(command, out, settings, repeat, perturb, **recording))


def _run_repeated(
    command: list[str], out: Path, settings: dict[str, Any], repeat: int, perturb: str | None, **recording: Any
) -> int:
    """Run a command once or several times, each into a folder of its own; return the first exit code that is not 0."""
    if perturb is not None:
        one_of("threads", "ulp")(perturb, "--perturb")
        if repeat < 2:
            raise SettingsError("--perturb changes repeated runs: add --repeat 2.")
    if perturb == "ulp" and recording["begin"] == "start":
        raise SettingsError("--perturb ulp changes the first module that is called: leave out --from start.")
    for number in range(repeat):
        place = out.with_name(f"{out.name}-{number + 1}") if number else out
        changed = {"kind": perturb, "number": number} if number and perturb else None
        code, made = run_captured(command, place, settings, perturb=changed, **recording)
        try:
            complete = _report(place, made, command, code, recording["begin"])
        except (OSError, TensorprobeError) as error:
            if not code:
                raise
            said = refusal(error) if isinstance(error, OSError) else error
            typer.echo(message(f"{type(error).__name__}: {said}"), err=True)
            complete = False
        if code or not complete:
            return code or 2
    return 0


def run_captured(
    command: list[str],
    out: Path,
    settings: dict[str, Any],
    *,
    begin: str,
    overwrite: bool,
    steps_by: str = "optimizer",
    perturb: dict[str, Any] | None = None,
    log: IO[bytes] | None = None,
) -> tuple[int, list[Path]]:
    """Run a command and record it; return its exit code and what it recorded. What it prints goes to `log`, if there is one.

    If it records nothing, what was there before stays.
    """
    from tensorprobe.record.run_folder import attempts, check_writable, other_places, refuse_existing

    CaptureSettings.of(**settings)
    refuse_existing(out, 0, overwrite=overwrite)
    check_writable(out.absolute())
    started = time.time() - _TICK_S
    orders = {
        "out": str(out.absolute()),
        "overwrite": overwrite,
        "from": begin,
        "started": started,
        "perturb": perturb,
        "settings": {"steps_by": steps_by, **settings},
    }
    with aside([*other_places(out), *attempts(out)], unless=lambda: bool(recorded_in(out, started))):
        code = run_command(command, {_HOOK: json.dumps(orders)}, log)
        made = recorded_in(out, started)
    return code, made


def recorded_in(out: Path, since: float = 0.0) -> list[Path]:
    """Return the runs that a command left there: one, and one for each time that its processes were started again.

    With `since`, only what was recorded after that time.
    """
    from tensorprobe.record.run_folder import attempts

    return [
        place
        for place in (out, *attempts(out))
        if (place / "manifest.json").exists()
        and (not since or any(part.stat().st_mtime >= since for part in place.glob("rank*.json")))
    ]


def _report(out: Path, places: list[Path], command: list[str], code: int, begin: str) -> bool:
    """Print what was recorded to stderr (stdout belongs to the script); return whether no call failed to be recorded."""
    from tensorprobe.record.reader import open_run
    from tensorprobe.record.run_folder import note_exit_code, put_training_first

    if not places:
        failed = f"{command[0]!r} ended with exit code {code} and recorded nothing into {str(out)!r}.\n"
        if recorded_in(out):
            failed += "  The run that it held before is still there.\n"
        if code:
            why = "If it failed before its first call of a torch module, its own output says why."
            typer.echo(message(f"{failed}  {why}"), err=True)
            return False
        needed = "torch" if begin == "start" else "a torch module (--from start also records calls outside of modules)"
        raise CommandFailed(
            f"{failed}  Either its output above says why, or none of its Python processes called {needed}.\n"
            "  An isolated Python (-I, -E, -S) cannot be captured from outside. In such a script use tensorprobe.capture(...)."
        )
    for place in places:
        put_training_first(place)
    note_exit_code(places[-1], code)
    for place in places:
        if place != out:
            typer.echo(f"The processes were started again. Attempt {place.name.removeprefix('attempt')}:", err=True)
        _report_run(place)
    if code:
        typer.echo(f"The command ended with exit code {code}.", err=True)
    typer.echo(f"Next:   tensorprobe inspect {shell(places[-1])}", err=True)
    sys.stderr.flush()
    run = open_run(places[-1])
    if all(part.closed and not part.coverage.recorded for part in run.parts.values()):
        typer.echo(
            "Nothing was recorded. The lines above say what was seen: the steps or filters chosen may not occur, or every\n"
            "call was made inside a compiled region.",
            err=True,
        )
        return False
    return not any(part.coverage.failed or part.coverage.first_error for part in run.parts.values())


def _report_run(place: Path) -> None:
    """Print the coverage of each rank of one run, and where it ends if it did not finish."""
    from tensorprobe.record.endings import describe_end
    from tensorprobe.record.reader import open_run
    from tensorprobe.record.run_folder import other_places
    from tensorprobe.report.inspect import render_coverage

    run = open_run(place)
    lines = [render_coverage(part.coverage, closed=part.closed) for part in run.parts.values()]
    told = dict.fromkeys(line for each in lines for line in each[1:])  # what several ranks say is said once
    typer.echo("\n".join([*(each[0] for each in lines), *told]), err=True)
    if ended := describe_end(run):
        typer.echo(f"RunIncomplete: {plain(ended)}", err=True)
    for other in other_places(place):
        typer.echo(f"  another     process of the command called modules too: {shell(other)}", err=True)

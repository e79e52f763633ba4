"""`tensorprobe audit`: what was recorded of each call of a run, against float64."""

from __future__ import annotations

from pathlib import Path

import typer

from tensorprobe.checks.settings import AuditSettings
from tensorprobe.cli.options import JSON, LIMIT, OUT, format_option, given, option
from tensorprobe.cli.precheck import Wanted, run_checks
from tensorprobe.model.precheck import Audit


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="audit")(audit)


def audit(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run, or a dump of another tool."),
    call: list[str] = option(AuditSettings, "calls", "--call", default=[]),
    module: list[str] = option(AuditSettings, "modules", "--module", default=[]),
    steps: str | None = option(AuditSettings, "steps"),
    ranks: str | None = option(AuditSettings, "ranks"),
    span: tuple[str, str] = option(AuditSettings, "span", "--span", default=("", ""), metavar="FIRST LAST"),
    sample: float | None = option(AuditSettings, "sample"),
    budget: str | None = option(AuditSettings, "budget", metavar="TIME"),
    reference: list[str] = option(AuditSettings, "references", "--reference", default=[]),
    standard: str = option(AuditSettings, "standard"),
    jobs: int = option(AuditSettings, "jobs", metavar="N"),
    engine: str = option(AuditSettings, "engine"),
    address: str | None = option(AuditSettings, "address"),
    time_limit: float = option(AuditSettings, "time_limit_s", "--time-limit", metavar="SECONDS"),
    max_replay_bytes: str | None = option(AuditSettings, "max_replay_bytes", metavar="SIZE"),
    out: Path | None = typer.Option(
        None, *OUT, metavar="FOLDER", help="Folder for the result: two tables, summary.json, saved failures."
    ),
    resume: Path | None = typer.Option(
        None, "--resume", metavar="FOLDER", help="Continue an audit that was stopped in this output folder."
    ),
    save_failures: bool = option(AuditSettings, "save_failures", "--save-failures"),
    dedupe: bool = option(AuditSettings, "dedupe", "--dedupe/--no-dedupe"),
    backward: bool = option(AuditSettings, "backward", "--backward/--no-backward"),
    form: list[str] = format_option(Audit),
    as_json: bool = JSON,
    limit: int = LIMIT,
) -> None:
    """Check what was recorded of each call of one run.

    Each call is recomputed in float64 from its recorded inputs, and its recorded outputs and gradients are compared with
    that. No second run and no device are needed. Exit code 0: all calls pass. 1: a call fails. 2: no call could be judged.
    """
    settings = given(AuditSettings, locals(), calls=call, modules=module, references=reference, time_limit_s=time_limit)
    from tensorprobe.checks.runner import audit as check_run

    run_checks(check_run, run, settings, Wanted(Audit, form, as_json, limit), out, resume)

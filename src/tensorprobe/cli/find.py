"""`tensorprobe find`: from two commands to the call where they part ways, with proof.

Each execution and each comparison is a stage with a folder of its own under the output folder. `find.json` there has the
commands and the stages that are done: the same command again continues where it was stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tensorprobe.cli.capture import recorded_in, run_captured
from tensorprobe.cli.command import RunsCommand
from tensorprobe.cli.options import JSON, LIMIT, OUT, option, progress, read_forms, show
from tensorprobe.errors import CommandFailed, NothingPaired, SettingsError
from tensorprobe.files import read_file, replace_file
from tensorprobe.model.search import SEARCH_VERSION, Execution, Search, Window
from tensorprobe.settings import parse_bytes
from tensorprobe.standard_json import decode, encode
from tensorprobe.taps.settings import CaptureSettings
from tensorprobe.text import counted, message, plain, ranges, shell, size
from tensorprobe.version import VERSION

if TYPE_CHECKING:
    from tensorprobe.engine import Result
    from tensorprobe.model.comparison import Comparison, Divergence
    from tensorprobe.model.precheck import Audit
    from tensorprobe.record import Run

_VS = "--vs"
_JOURNAL = "find.json"
_ROUNDS = 3
"""How many steps are recorded with values, one after the other, while what seemed to diverge turns out to be rounding."""
_VALUE_RUNS = 4
"""Two with values of calls, two with values of the ATen calls inside one of them: they share the bytes."""
_TAIL, _TAIL_BYTES = 5, 4096
_INTERRUPTED = 130


class _Journal(msgspec.Struct, kw_only=True):
    """What is asked for, and what is done of it."""

    asked: dict[str, Any]
    executions: dict[str, Execution] = {}
    """Folder → what was executed into it."""
    results: list[str] = []
    """Folders of comparisons and audits that are complete."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="find", cls=RunsCommand)(find)


def find(
    commands: list[str] = typer.Argument(
        metavar="COMMAND... [--vs COMMAND...]",
        help="After --: the command that is trusted, --vs, the command under test. With --baseline only the latter.",
    ),
    out: Path = typer.Option(
        ..., *OUT, metavar="FOLDER", help="Folder for all runs and results. If it holds some, find continues there."
    ),
    baseline: Path | None = typer.Option(
        None, "--baseline", metavar="RUN", help="A run recorded elsewhere, in place of the first command."
    ),
    max_bytes: str = typer.Option(
        "4G", "--max-bytes", metavar="SIZE", help="Maximum bytes of values in all runs that are recorded, e.g. 512M."
    ),
    steps: str | None = option(CaptureSettings, "steps"),
    begin: str = typer.Option("module", "--from", metavar="BEGIN", help="Where recording begins, as for capture."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be run and written, and stop."),
    as_json: bool = JSON,
    limit: int = LIMIT,
) -> None:
    """Run two commands and find the first call where they part ways.

    Both commands are recorded with summaries, each twice: nondeterminism is reported first. Then they run again and only the
    steps and calls around the first difference are recorded with values, and the difference is proved by replays in float64;
    then once more with the ATen calls inside the call that is wrong.
    Exit code 0: they agree. 1: they diverge. 2: they cannot be compared.
    """
    from tensorprobe.report.forms import Answer

    first, second = _split(commands, baseline)
    asked: dict[str, Any] = {
        "baseline": first if baseline is None else str(baseline.absolute()),
        "candidate": second,
        "max_bytes": parse_bytes(max_bytes, "max_bytes"),
        "steps": steps,
        "from": begin,
    }
    CaptureSettings.of(steps=steps)
    forms = read_forms([], as_json, Search)
    _tell(_plan(first, second, baseline, out, asked["max_bytes"]))
    if dry_run:
        return
    result = _Finder(out, asked, first, second, baseline).search()
    replace_file(out / "answer.json", encode(result, indent=2).encode() + b"\n")
    show(Answer(result), forms, limit)


def _split(words: list[str], baseline: Path | None) -> tuple[list[str], list[str]]:
    """Return both commands; the first is empty where there is a run in its place."""
    if (_VS in words) == (baseline is not None):
        raise SettingsError(
            "with --baseline there is only one command: leave out --vs."
            if baseline is not None
            else "expected two commands: -- python a.py --vs python b.py\n"
            "  If only one can be run here, pass the run of the other: --baseline RUN -- python b.py"
        )
    at = words.index(_VS) if baseline is None else 0
    first, second = words[:at], words[at + 1 :] if baseline is None else words
    if not second or (baseline is None and not first):
        raise SettingsError("a command is missing beside --vs.")
    return first, second


def _plan(first: list[str], second: list[str], baseline: Path | None, out: Path, most: int) -> str:
    """Return what is going to be run and written."""
    said = {"baseline": first, "candidate": second} if baseline is None else {"candidate": second}
    lines = [f"find       writes to {shell(out)}: at most {size(most)} of values, and summaries"]
    lines += [f"{name:<10} {' '.join(map(shell, words))}" for name, words in said.items()]
    if baseline is not None:
        lines.insert(1, f"baseline   {shell(baseline)}: a run; its command is not executed")
    each = "both commands" if baseline is None else "the command"
    lines += [
        f"1          {each} twice with summaries: is each the same as itself, and where do the two part?",
        f"2          {each} with values around the first difference; replay it in float64",
        f"3          {each} with the ATen calls inside the call that is wrong",
    ]
    return "\n".join(lines)


def _tell(text: str) -> None:
    for line in text.split("\n"):
        typer.echo(message(line), err=True)
    sys.stderr.flush()


class _Finder:
    """The stages, in order."""

    def __init__(
        self, out: Path, asked: dict[str, Any], first: list[str], second: list[str], baseline: Path | None
    ) -> None:
        self._out, self._asked = out, asked
        self._commands = {"candidate": second} if baseline is not None else {"baseline": first, "candidate": second}
        self._given = baseline
        self._journal = self._resume()
        self._notes: list[str] = []

    def _resume(self) -> _Journal:
        """Return the journal in the folder, or a new one. SettingsError if the folder has something else."""
        path = self._out / _JOURNAL
        if path.is_file():
            held = decode(read_file(path), _Journal, what="a search")
            if held.asked != self._asked:
                changed = [name for name, value in self._asked.items() if held.asked.get(name) != value]
                raise SettingsError(
                    f"'{self._out}' holds another search: {', '.join(changed)} differ. Pass another folder."
                )
            return held
        if self._out.exists() and any(self._out.iterdir()):
            raise SettingsError(f"'{self._out}' is not empty and holds no search. Pass another folder.")
        try:
            self._out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"'{self._out}' cannot be used as an output folder: {error.strerror}.") from error
        return _Journal(asked=self._asked)

    def _keep(self) -> None:
        replace_file(self._out / _JOURNAL, encode(self._journal, indent=1).encode() + b"\n")

    def search(self) -> Search:
        """Do what is not done yet, and return the answer."""
        repeats = {}
        for which in self._commands:
            once, again = (self._record(which, f"{name}-{which}", self._cheap()) for name in ("summary", "again"))
            repeats[which] = self._compare(once, again, f"repeat-{which}").summary
            if repeats[which].exit_code:
                _tell(f"NOT REPEATABLE  two executions of the {which}'s command differ; see {self._out}/repeat-{which}")
        window, comparison, runs = self._look_closer()
        inside, audits = None, {}
        if window is not None and self._given is not None and not _has_values(runs[0]):
            self._notes.append("the baseline has no values: the candidate's calls were audited alone")
            audits["values"] = self._audit(runs[1], "audit")
        place = comparison.divergence
        if place is not None and place.status == "introduced" and place.level == "api":
            inside = self._narrow(place, audits)
        code = comparison.exit_code
        if code == 1 and _may_be_chance(place, repeats.values()):
            code = 2
        return Search(
            schema_version=SEARCH_VERSION,
            tool=VERSION,
            exit_code=code,
            executions=list(self._journal.executions.values()),
            repeats=repeats,
            comparison=comparison,
            window=window,
            inside=inside,
            audits=audits,
            notes=self._notes,
        )

    def _look_closer(self) -> tuple[Window | None, Comparison, tuple[Run, Run]]:
        """Record values around the first difference and compare them; where they agree, go on with the steps after it."""
        from tensorprobe.engine.narrow import choose_window
        from tensorprobe.record import open_run

        first = self._given or self._out / "summary-baseline"
        summaries = open_run(first), open_run(self._out / "summary-candidate")
        result = self._compare(first, self._out / "summary-candidate", "summary")
        window, steps = None, result.summary.steps
        for turn in range(_ROUNDS):
            summary = result.summary
            alone = summary.divergence is not None and not summary.divergence.call
            share = self._asked["max_bytes"] // _VALUE_RUNS // (turn + 1)
            chosen = choose_window(summary, summaries[alone], most_bytes=share)
            if chosen is None:
                return window, summary, summaries
            window = chosen
            name = "-".join(["values", *(["step", str(window.steps[-1])] if turn else [])])
            runs = self._values(window, name, share)
            closer = self._compare(runs[0].path, runs[1].path, name.replace("values", "result"), steps=window.steps)
            if closer.exit_code or summary.exit_code == 0:
                return window, closer.summary, runs
            self._notes.append(
                f"step {ranges(window.steps)} seemed to diverge by its summaries; with values it agrees (noise, not a fault)"
            )
            steps = [step for step in steps if step > window.steps[-1]]
            if not steps:
                return window, closer.summary, runs
            result = self._compare(first, self._out / "summary-candidate", f"summary-step-{steps[0]}", steps=steps)
        self._notes.append(f"{counted(_ROUNDS, 'step')} were recorded with values; later ones were not")
        return window, result.summary, summaries

    def _values(self, window: Window, name: str, share: int) -> tuple[Run, Run]:
        """Record what the window says, with values; the baseline is the run that was given, if one was."""
        from tensorprobe.record import open_run

        part = f"{window.calls:,} of " if window.names else ""
        _tell(
            f"values     step {ranges(window.steps)}: {part}{counted(window.of_calls, 'call')}, about "
            f"{size(window.size_bytes)} in each run"
        )
        settings = {"level": self._level(), "mode": "tensor", "steps": _numbers(window.steps), "max_bytes": share}
        settings |= {"ranks": _numbers(window.ranks)} if window.ranks else {}
        settings |= {"names": window.names} if window.names else {}
        made = {which: self._record(which, f"{name}-{which}", settings) for which in self._commands}
        return open_run(self._given or made["baseline"]), open_run(made["candidate"])

    def _narrow(self, place: Divergence, audits: dict[str, Audit]) -> Comparison | None:
        """Record the ATen calls inside a call, and return what they say."""
        from tensorprobe.engine.narrow import both_directions

        settings: dict[str, Any] = {
            "level": "aten",
            "mode": "tensor",
            "steps": str(place.step),
            "ranks": str(place.rank),
            "max_bytes": self._asked["max_bytes"] // _VALUE_RUNS,
        }
        made = {}
        for which, call in (("baseline", place.call), ("candidate", place.candidate_call)):
            if which in self._commands:
                inside = {"inside": [both_directions(call)]}
                made[which] = self._record(which, f"aten-{which}", settings | inside, needed=False)
        if None in made.values():
            self._notes.append(f"no ATen call was seen inside {place.call or place.candidate_call}")
            return None
        if self._given is not None:
            audits["inside"] = self._audit(made["candidate"], "audit-aten")
            return None
        try:
            return self._compare(made["baseline"], made["candidate"], "result-aten").summary
        except NothingPaired as none:
            self._notes.append(f"ATen calls inside {place.call}: {str(none).splitlines()[0]}")
            return None

    def _cheap(self) -> dict[str, Any]:
        asked = self._asked["steps"]
        return {"level": self._level(), "mode": "summary"} | ({} if asked is None else {"steps": asked})

    def _level(self) -> str:
        """Return the level of the baseline that was given: runs of different levels cannot be compared."""
        if self._given is None:
            return "api"
        from tensorprobe.record import open_run

        return str(open_run(self._given).manifest.settings.get("level", "api"))

    def _record(self, which: str, name: str, settings: dict[str, Any], *, needed: bool = True) -> Any:
        """Return the folder of a recorded execution. None if nothing was recorded and that is no error."""
        from tensorprobe.record.run_folder import put_training_first

        place, command = self._out / name, self._commands[which]
        if name not in self._journal.executions:
            _tell(f"running    {which} into {shell(place)}")
            with (self._out / f"{name}.log").open("wb") as log:
                code, made = run_captured(command, place, settings, begin=self._asked["from"], overwrite=True, log=log)
            if code == _INTERRUPTED:
                _tell("Stopped. To continue, run the same command again.")
                raise typer.Exit(code)
            for run in made:
                put_training_first(run)
            if not made and needed:
                raise CommandFailed(_why(command, code, self._out / f"{name}.log", self._asked["from"]))
            kept = {key: plain(value) for key, value in settings.items() if key != "names"}
            done = Execution(run=str(place), command=command, settings=kept, exit_code=code)
            self._journal.executions[name] = done
            self._keep()
        if code := self._journal.executions[name].exit_code:
            note = f"the {which}'s command ended with exit code {code}"
            self._notes += [] if note in self._notes else [note]
        held = recorded_in(place)
        return held[-1] if held else None

    def _compare(self, first: Path, second: Path, name: str, **settings: Any) -> Result:
        """Return the comparison of two runs, from its folder if it is done."""
        from tensorprobe.engine import compare
        from tensorprobe.engine.output import read_result

        place = self._out / name
        if name in self._journal.results:
            return read_result(place)
        with progress("comparing calls") as bar:
            made = compare(first, second, out=place, progress=bar, **settings)
        self._finish(name)
        return made

    def _audit(self, run: Run | Path, name: str) -> Audit:
        from tensorprobe.checks.runner import audit
        from tensorprobe.model.precheck import Audit

        place = self._out / name
        if name in self._journal.results:
            return decode(read_file(place / "summary.json"), Audit, what="an audit")
        made: Audit = audit(run, out=place, save_failures=True).summary
        self._finish(name)
        return made

    def _finish(self, name: str) -> None:
        self._journal.results.append(name)
        self._keep()


def _has_values(run: Run) -> bool:
    return str(run.manifest.settings.get("mode", "tensor")) == "tensor"


def _numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _may_be_chance(place: Divergence | None, repeats: Iterable[Comparison]) -> bool:
    """Return whether a divergence stands where two executions of one command differ too, and no replay has proved a fault."""
    if place is not None and place.proof is not None and place.proof.at_fault:
        return False
    return any(
        twice.exit_code == 1
        and (
            place is None
            or twice.divergence is None
            or (twice.divergence.step, twice.divergence.index) <= (place.step, place.index)
        )
        for twice in repeats
    )


def _why(command: list[str], code: int, log: Path, begin: str) -> str:
    """Return why there is no run, with the last lines that the command printed."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL:]
    hint = (
        ""
        if code or begin == "start"
        else "\n  It called no torch module. --from start also records calls outside of modules."
    )
    said = "".join(f"\n  {plain(line)}" for line in lines)
    return f"{command[0]!r} ended with exit code {code} and recorded nothing; all that it printed: {log}{hint}{said}"

"""Online compare: `with tensorprobe.online(...) as watch:` around whatever is to be watched, forward, backward and optimizer.

In: a program at work. Out: one line in the log for each call that fails, its inputs and outputs on disk, and a report.
Nothing of the program's results is changed, unless `heal` is asked for.
"""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.judge.policy import Policy
from tensorprobe.model.online import OnlineResult, OnlineRow
from tensorprobe.report.online_text import render_online
from tensorprobe.settings import capture_settings, demand_known, parse_bytes
from tensorprobe.taps.probe import Probe, active_probe
from tensorprobe.taps.ranks import find_rank
from tensorprobe.watches.online.chain import Chain
from tensorprobe.watches.online.checker import Checker
from tensorprobe.watches.online.findings import Findings, make_folder
from tensorprobe.watches.online.policies import Measures
from tensorprobe.watches.online.sampling import Sampler
from tensorprobe.watches.online.workers import Workers

REFERENCES = {"cpu": "own", "cpu-fp32": "single", "cpu-fp64": "double"}
ON_FAIL = ("save", "report")


class OnlineWatch:
    """A running online compare. `report` and `result` may be asked at any time; `step` ends a step where no optimizer does."""

    def __init__(
        self,
        model: Any = None,
        *,
        out: str | os.PathLike[str] | None = None,
        reference: str = "cpu-fp64",
        policy: str | os.PathLike[str] | Policy = "noise-aware",
        on_fail: str = "save",
        stop_after: int | None = None,
        heal: bool = False,
        chain: bool = False,
        every: int = 1,
        once_per_kind: bool = False,
        ops: tuple[str, ...] | list[str] = (),
        modules: tuple[str, ...] | list[str] = (),
        steps: Any = None,
        libraries: tuple[str, ...] | list[str] = (),
        workers: int = 0,
        budget: int | str = "1GB",
        most_saved: int = 100,
        overwrite: bool = False,
    ) -> None:
        _check(reference, on_fail, out, every, once_per_kind, workers, heal, chain, stop_after, most_saved)
        chosen = capture_settings(level="aten", ops=ops, modules=modules, steps=steps)
        self.reference, self.out = reference, None if out is None else Path(out)
        self._overwrite = overwrite
        self._finding_settings = {"saves": on_fail == "save", "stop_after": stop_after, "most_saved": most_saved}
        self._measures = Measures(policy)
        self._chain = Chain() if chain else None
        self._workers, self._budget = workers, parse_bytes(budget, "budget")
        self._checker_settings = {
            "narrow": bool(ops or modules),
            "precision": REFERENCES[reference],
            "sampler": Sampler(every, once_per_kind),
            "libraries": frozenset((libraries,) if isinstance(libraries, str) else libraries),
            "heal": heal,
        }
        self._probe_settings: dict[str, Any] = {"ops": chosen.ops, "modules": chosen.modules, "steps": chosen.steps}
        self._model = model
        self._probe: Probe | None = None
        self._findings: Findings | None = None

    def start(self) -> OnlineWatch:
        """Begin. RunExists when the folder holds another's results, SettingsError when a probe is running already."""
        if self._findings is not None:
            raise SettingsError("this watch was started before. Make a new one.")
        running = active_probe()
        if running is not None:  # before anything is replaced in the folder
            raise SettingsError(f"a probe into {str(running.out)!r} is running in this process. Stop it first.")
        rank = find_rank()
        folder = None if self.out is None else make_folder(self.out / f"rank{rank}", self._overwrite)
        workers = Workers(self._workers, self._budget)
        findings = Findings(
            reference=self.reference,
            policy=self._measures.name,
            rank=rank,
            folder=folder,
            workers=workers,
            chain=self._chain,
            **self._finding_settings,  # type: ignore[arg-type]
        )
        checker = Checker(
            measures=self._measures,
            workers=workers,
            chain=self._chain,
            found=findings.found,
            **self._checker_settings,  # type: ignore[arg-type]
        )
        findings.ask(checker)
        probe = Probe(
            folder or ".",
            model=self._model,
            steps_by="optimizer",
            sink=findings,
            level="aten",
            **self._probe_settings,
        )
        try:
            probe.start()
        except BaseException:
            workers.close()
            raise
        self._findings, self._probe, self._model = findings, probe, None
        return self

    def step(self) -> None:
        """Say that a training step has ended."""
        if self._probe is not None:
            self._probe.step()

    def stop(self) -> OnlineResult:
        """End. Everything that was installed is gone, all calls are judged, and the result is on disk."""
        if self._probe is not None:
            self._probe.stop()
        return self.result

    def __enter__(self) -> OnlineWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def result(self) -> OnlineResult:
        """What is known by now."""
        if self._findings is None:
            raise SettingsError("this watch was not started.")
        return self._findings.result

    @property
    def failures(self) -> list[OnlineRow]:
        """The rows that failed, in the order of execution."""
        return self.result.failures

    @property
    def report(self) -> str:
        """The answer first, then the counts."""
        result = self.result
        folder = None if self._findings is None else self._findings.folder
        return render_online(result, None if folder is None else str(folder))


def online(model: Any = None, **settings: Any) -> OnlineWatch:
    """Watch every ATen call inside the `with` and compare it with the reference; see OnlineWatch for the settings."""
    demand_known(settings, list(signature(OnlineWatch).parameters)[1:])
    return OnlineWatch(model, **settings)


def _check(
    reference: str,
    on_fail: str,
    out: object,
    every: int,
    once_per_kind: bool,
    workers: int,
    heal: bool,
    chain: bool,
    stop_after: int | None,
    most_saved: int,
) -> None:
    """SettingsError for what cannot be meant."""
    for name, value, known in (("reference", reference, REFERENCES), ("on_fail", on_fail, ON_FAIL)):
        if str(value) not in known:
            hint = did_you_mean(str(value), known)
            raise SettingsError(f"{name} is {value!r}; it must be {' or '.join(known)}.{hint}")
    for name, number, least in (
        ("every", every, 1),
        ("workers", workers, 0),
        ("stop_after", stop_after if stop_after is not None else 1, 1),
        ("most_saved", most_saved, 0),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise SettingsError(f"{name} is {number!r}; it must be a whole number, {least} or more.")
    if on_fail == "save" and out is None:
        raise SettingsError("on_fail='save' needs out=, the folder for the failing calls; or say on_fail='report'.")
    if heal and workers:
        raise SettingsError(f"heal needs the reference's result at once: workers={workers} cannot go with it.")
    if chain and (workers or every != 1 or once_per_kind):
        raise SettingsError("chain follows every call in order: workers, every and once_per_kind cannot go with it.")

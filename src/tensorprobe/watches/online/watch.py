"""Online compare: `with tensorprobe.online(...) as watch:` around the code to watch: forward, backward and optimizer.

Each failing call gets a line in the log, and its inputs and outputs are saved. A report follows at the end. The results of the
program do not change, unless `heal` is set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from tensorprobe.errors import SettingsError
from tensorprobe.judge.policy import Policy
from tensorprobe.model.online import OnlineResult, OnlineRow
from tensorprobe.report.forms import render
from tensorprobe.report.notebook import Text
from tensorprobe.settings import Names, Numbers, public
from tensorprobe.taps.probe import Probe, active_probe
from tensorprobe.taps.ranks import find_rank
from tensorprobe.watches.online.chain import Chain
from tensorprobe.watches.online.checker import Checker
from tensorprobe.watches.online.findings import Findings, make_folder
from tensorprobe.watches.online.policies import Measures, Sampler
from tensorprobe.watches.online.settings import REFERENCES, OnlineSettings
from tensorprobe.watches.online.workers import Workers


class OnlineWatch:
    """A running online compare. `report` and `result` can be read at any time. Call `step` after each step if there is no
    optimizer."""

    def __init__(self, model: Any = None, **settings: Any) -> None:
        chosen = OnlineSettings.of(**settings)
        self.reference, self.out = chosen.reference, None if chosen.out is None else Path(chosen.out)
        self._overwrite = chosen.overwrite
        self._finding_settings = {
            "saves": chosen.on_fail == "save",
            "stop_after": chosen.stop_after,
            "most_saved": chosen.most_saved,
        }
        self._measures = Measures(chosen.policy)
        self._chain = Chain() if chosen.chain else None
        self._threads, self._budget = chosen.workers, chosen.budget
        self._checker_settings = {
            "narrow": bool(chosen.ops or chosen.modules),
            "precision": REFERENCES[chosen.reference],
            "sampler": Sampler(chosen.every, chosen.once_per_kind),
            "libraries": frozenset(chosen.libraries),
            "heal": chosen.heal,
        }
        self._probe_settings: dict[str, Any] = {"ops": chosen.ops, "modules": chosen.modules, "steps": chosen.steps}
        self._model = model
        self._probe: Probe | None = None
        self._findings: Findings | None = None
        self._workers: Workers | None = None

    def start(self) -> OnlineWatch:
        """Start. Raises RunExists if the folder holds other results, SettingsError if a probe is already running."""
        if self._findings is not None:
            raise SettingsError("this watch has already been started. Make a new one.")
        running = active_probe()
        if running is not None:  # before anything is replaced in the folder
            raise SettingsError(f"a probe into {str(running.out)!r} is running in this process. Stop it first.")
        rank = find_rank()
        folder = None if self.out is None else make_folder(self.out / f"rank{rank}", self._overwrite)
        workers = self._workers = Workers(self._threads, self._budget)
        try:
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
            self._probe = Probe(
                folder or ".",
                model=self._model,
                steps_by="optimizer",
                sink=findings,
                level="aten",
                **self._probe_settings,
            )
            self._probe.start()
            self._findings, self._model = findings, None
            return self
        except BaseException:
            self._end()
            raise

    def step(self) -> None:
        """End a training step."""
        if self._probe is not None:
            self._probe.step()

    def stop(self) -> OnlineResult:
        """Stop: judge the remaining calls, remove everything that was installed, write the result and return it."""
        self._end()
        return self.result

    def _end(self) -> None:
        try:
            if self._probe is not None:
                self._probe.stop()
        finally:
            if self._workers is not None:
                self._workers.close()

    def __enter__(self) -> OnlineWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except BaseException:
            self._end()
            raise

    @property
    def result(self) -> OnlineResult:
        """The result so far."""
        if self._findings is None:
            raise SettingsError("this watch was not started.")
        return self._findings.result

    @property
    def failures(self) -> list[OnlineRow]:
        """The rows that failed, in execution order."""
        return self.result.failures

    @property
    def report(self) -> Text:
        """The result so far, as text; a card in a notebook."""
        result = self.result
        folder = None if self._findings is None else self._findings.folder
        return Text.of(render(result, folder=None if folder is None else str(folder)), result.exit_code)


@public
def online(
    model: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    reference: Literal["cpu", "cpu-fp32", "cpu-fp64"] = "cpu-fp64",
    policy: str | os.PathLike[str] | Policy = "noise-aware",
    on_fail: Literal["save", "report"] = "save",
    stop_after: int | None = None,
    heal: bool = False,
    chain: bool = False,
    every: int = 1,
    once_per_kind: bool = False,
    ops: Names = (),
    modules: Names = (),
    steps: Numbers | None = None,
    libraries: Names = (),
    workers: int = 0,
    budget: int | str = "1GB",
    most_saved: int = 100,
    overwrite: bool = False,
) -> OnlineWatch:
    """Compare every ATen call inside the `with` block with the same call on the CPU, while the program runs.

        with tensorprobe.online(model, out="runs/online") as watch:
            train()
        print(watch.report)

    Args:
        model: gives modules their names in the report.
        out: folder for the report and for the inputs and outputs of failing calls.
        reference: what each call is compared with: the same call on the CPU in its own precision (`cpu`), in float32
            (`cpu-fp32`) or in float64 (`cpu-fp64`).
        policy: how differences are judged: the name of a policy, or the path of a TOML file.
        on_fail: `save` writes failing calls to `out`; `report` only reports them.
        stop_after: raise TrainingStopped after this many failing calls.
        heal: replace the result of a failing call by the reference's. Nothing else changes a result of the program.
        chain: follow the error from call to call: how much is inherited, how much is introduced.
        every, once_per_kind: compare every n-th call of each op; one call for each combination of dtypes and shapes.
        ops, modules, steps: compare only these; names match as part of the text or as a glob, steps are `0,2-4`.
        libraries: also compare ops of these torch.library namespaces.
        workers, budget: threads that run the reference, and the memory for calls that wait for one.
        most_saved: maximum number of failing calls that are saved.
        overwrite: replace the results of an earlier online compare in `out`.

    Raises SettingsError for a setting that is wrong, before anything starts.
    """
    settings = dict(locals())
    return OnlineWatch(settings.pop("model"), **settings)

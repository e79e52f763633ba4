"""The probe: what a user starts, steps and stops. It installs the taps and removes every one of them.

Errors in the settings or the folder are raised by `start`, before training begins. Later errors of the tool are counted and
reported in one CaptureIncomplete warning at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import msgspec

from tensorprobe import torch_names
from tensorprobe.errors import CaptureIncomplete, SettingsError
from tensorprobe.model import Coverage
from tensorprobe.model.sink import LookingSink, Sink
from tensorprobe.record.provenance import redacted
from tensorprobe.record.run_sink import RunSink
from tensorprobe.settings import Names, Numbers, public
from tensorprobe.taps.alone import AloneRun
from tensorprobe.taps.collectives import Collectives
from tensorprobe.taps.custom_functions import CustomFunctionTap
from tensorprobe.taps.dispatch_tap import DispatchTap
from tensorprobe.taps.function_tap import Describing, Handling, Plans, function_tap_type
from tensorprobe.taps.looking import Looking
from tensorprobe.taps.machinery import MachineryTap
from tensorprobe.taps.modes import ModeStack
from tensorprobe.taps.module_names import ModuleNames, inner_module
from tensorprobe.taps.module_tap import ModuleTap
from tensorprobe.taps.patches import remover
from tensorprobe.taps.ranks import coordinates, find_rank, find_world_size, main_device
from tensorprobe.taps.recompute import RecomputeTap
from tensorprobe.taps.select import Selection
from tensorprobe.taps.session import Session
from tensorprobe.taps.settings import CaptureSettings, Mode
from tensorprobe.taps.sites import forget_sites
from tensorprobe.taps.stacks import StackBook
from tensorprobe.taps.step_taps import RegionTap, StepTap
from tensorprobe.taps.training import Training
from tensorprobe.taps.uncompiled import keep_uncompiled

_active: Probe | None = None
_active_lock = threading.Lock()
_LONGEST_ERROR = 300
STEPS_BY = ("call", "optimizer", "forward")


class Tap(Protocol):
    """Something that is installed for a recording, and removed at its end."""

    def install(self) -> None:
        """Start watching."""

    def remove(self) -> None:
        """Stop watching."""


class Probe:
    """Records what a PyTorch program computes into the folder `out`.

    `model` gives modules their names; without it, the outermost module that is called does. `overwrite` replaces a run
    that is already in `out`. `rank` is for programs that know it better than torch.distributed and the launcher do. A `sink`
    receives the calls in place of a recorder; then nothing is written, and `out` is only the name in messages. `remarks` are
    added to the notes of the coverage.
    The other settings are listed in `CaptureSettings`.
    """

    is_self_test = False

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        model: Any = None,
        overwrite: bool = False,
        steps_by: str = "call",
        rank: int | None = None,
        sink: Sink | None = None,
        remarks: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.out = Path(out)
        self.settings: CaptureSettings = CaptureSettings.of(**settings)
        if steps_by not in STEPS_BY:
            raise SettingsError(f"steps_by is {steps_by!r}; expected 'call' (of probe.step), 'optimizer' or 'forward'.")
        self.coverage: Coverage | None = None
        self._model_device = None if model is None else main_device(model)
        self._steps_by = steps_by
        self._has_called_model = False
        self._given_rank = rank
        self._remarks = list(remarks)
        if not isinstance(sink, Sink | None):
            raise SettingsError(f"sink is {sink!r}; expected an instance of a class derived from Sink.")
        self._sink = sink if sink is not None else RunSink(self.out, overwrite=overwrite)
        self._names = ModuleNames(as_torch=self._sink.needs.rules.torch_paths)
        self._names.add(model if model is not None else ())
        self.numbers: dict[str, int] = {}
        """The next number of each op, once the probe has stopped."""
        self._session: Session | None = None
        self._step = 0
        self._modes, self._taps, self._paused = ModeStack(None, None), list[Tap](), True
        self._remove_patches: Callable[[], None] = lambda: None

    @property
    def running(self) -> bool:
        """Return whether the probe was started and not stopped."""
        return self._session is not None

    @property
    def step_number(self) -> int:
        """Return the current step."""
        return self._step

    def start(self) -> Probe:
        """Start recording, after a self-test of a few calls.

        Raises RunExists when the folder is taken, SettingsError when another probe is running, SelfTestFailed when capture
        does not work here.
        """
        global _active
        if self._session is not None:
            return self
        rank = find_rank() if self._given_rank is None else self._given_rank
        world_size = max(find_world_size(), rank + 1)
        self._sink.check(rank)
        self._wanted_rank = self.settings.ranks is None or rank in self.settings.ranks
        if self._wanted_rank and self._sink.needs.self_test and not self.is_self_test:
            self._test_itself()
        try:
            with _active_lock:
                if _active is not None:
                    raise SettingsError(f"a probe into {str(_active.out)!r} is running in this process. Stop it first.")
                _active = self
            if self._wanted_rank:
                self._begin(rank, world_size)
            return self
        except BaseException:
            self._end()
            raise

    def step(self) -> None:
        """End the current training step."""
        if self._session is not None and not self._session.forked and not self._steps.take_over():
            self._next_step()
            self._session.state.phase = ""  # else the next batch would be loaded in the evaluation before it

    def begin_microbatch(self) -> None:
        """Count a micro-batch of this step: for trainers that call parts of the model, not the model itself."""
        if self._session is not None and self._session.training is not None:
            self._session.training.begin_microbatch()

    def stop(self) -> Coverage | None:
        """End the run, remove everything that was installed, and return the coverage when all is on disk.

        In a forked child this only removes what was inherited: the run goes on in the parent.
        """
        session = self._session
        try:
            self._end()
        except BaseException:
            self._end()
            raise
        if session is not None and session.forked:
            return None
        if session is not None:
            self._warn()
        return self.coverage

    def _end(self) -> None:
        """Undo every step of the start, the last one first, even if one raises. This can be called again if it was interrupted."""
        session = self._session
        if session is None:
            self._leave()
            return
        with contextlib.ExitStack() as ending:
            if not session.forked:
                ending.callback(self._close, session)
            ending.callback(self._leave)
            ending.callback(forget_sites)
            ending.callback(self._remove_patches)  # the taps do it, unless they are interrupted
            for tap in self._taps:
                ending.callback(tap.remove)
            ending.callback(self._modes.leave)
            ending.callback(session.end)
            ending.callback(self._pause, session)
        self._session = None
        atexit.unregister(self._stop_at_exit)

    def _leave(self) -> None:
        global _active
        if _active is self:
            _active = None

    def __enter__(self) -> Probe:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._sink.ended_by = _told(error)
            self.stop()
        except BaseException:
            self.stop()
            raise

    def _stop_at_exit(self) -> None:
        """Stop at the end of the program. If an uncaught exception ended it, Python has printed that already."""
        self._sink.ended_by = _told(getattr(sys, "last_value", None))
        self.stop()

    def _test_itself(self) -> None:
        from tensorprobe.taps.self_test import demand_working_capture

        if _active is None:
            demand_working_capture(str(self.settings.level), self.settings.mode, self._device())

    def _begin(self, rank: int, world_size: int) -> None:
        settings = self.settings
        rules = self._sink.needs.rules
        selection = Selection(
            phases=settings.phases,
            directions=settings.directions,
            sides=settings.sides,
            names=settings.names,
            span=settings.span,
            ops=settings.ops,
            modules=settings.modules,
            inside=settings.inside,
            listed=rules.listed,
            only=rules.only,
            excluded=rules.excluded,
        )
        stacks = StackBook() if settings.wants_stacks else None
        session = Session(self._sink, selection, stacks)
        try:
            self._sink.open(rank, world_size, settings)
            self._session = session
        except BaseException:
            self._sink.close(Coverage(), {}, "")
            raise
        self._install(session)
        atexit.register(self._stop_at_exit)

    def _install(self, session: Session) -> None:
        level, rules = self.settings.level, self._sink.needs.rules
        self._remove_patches = remover()
        self._collectives = Collectives(session)
        self._recompute = RecomputeTap(session)
        self._machinery = MachineryTap(session)
        if self._sink.needs.roles:
            session.training = Training(session, self._names)
        self._steps = StepTap(self._next_step, by_optimizer=self._steps_by == "optimizer")
        dispatch = DispatchTap(session, self._collectives) if level.has_aten else None
        alone = None if self._sink.needs.alone is None else AloneRun(self._sink.needs.alone, session, dispatch)
        plans: Plans = {}
        describing = Describing(session, plans, self._collectives, record=level.has_api, alone=alone)
        handling: Handling = describing
        if self._sink.needs.look:
            handling = Looking(session, plans, cast(LookingSink, self._sink), describing)
        function = function_tap_type(session, plans, handling) if level.sees_api else None
        self._modes = ModeStack(function, dispatch)
        self._modes.passed_compiled = session.pass_by_compiled
        for mode in (function, dispatch):
            if mode is not None:
                mode.left_behind = self._modes.leave_soon
        describing.run_visibly = self._modes.run_visibly
        if function is not None:
            function.run_visibly = self._modes.run_visibly
        self._modules = ModuleTap(
            session, self._names, self._steps, record=level.has_modules, before=self._before_outermost
        )
        self._taps = [self._modules, self._recompute, self._collectives, self._machinery]
        if session.training is not None:
            self._taps.append(session.training)
        self._taps.append(self._steps)  # after the others that watch optimizers: it begins the next step
        if level.has_api and handling is describing and rules.inner:
            self._taps.append(CustomFunctionTap(session, describing))
        if rules.regions:
            self._taps.append(RegionTap(session.enter_region))
        keep_uncompiled()
        for tap in self._taps:
            tap.install()
        self._resume_if_wanted(session)

    def _before_outermost(self, module: Any) -> None:
        """Note the call of an outermost module. With steps by `forward`, each call of the model except the first begins a step."""
        self._modes.settle()
        if self._steps.awaits_model:
            self._steps.before_model(module)
        if self._steps_by == "forward":
            while (inner := inner_module(module)) is not None:
                module = inner
            if self._names.root in (None, module):
                if self._has_called_model:
                    self._next_step()
                self._has_called_model = True

    def _next_step(self) -> None:
        session = self._session
        if session is not None and not session.forked:
            self._pause(session, whole=True)
            self._step += 1
            if session.training is not None:
                session.training.microbatch = None
            self._resume_if_wanted(session)

    def _resume_if_wanted(self, session: Session) -> None:
        """Install the modes, unless the step was not selected: it runs at full speed then."""
        wanted = self.settings.steps is None or self._step in self.settings.steps
        if not wanted:
            session.unwritten.clear()
        if wanted and not session.over:
            session.begin_step(self._step)
            self._modes.install()
            self._modes.follow_threads()
            self._paused = False
            session.recording = True

    def _pause(self, session: Session, *, whole: bool = False) -> None:
        if not self._paused:
            self._collectives.end_step()
            session.end_step(whole=whole)
            session.recording = False
            self._modes.unfollow_threads()
            self._modes.remove()
            self._paused = True

    def _close(self, session: Session) -> None:
        self.numbers = session.numbers_now()
        coverage = session.coverage()
        coverage = msgspec.structs.replace(coverage, notes=[*self._remarks, *coverage.notes])
        kept = self._sink.close(coverage, coordinates(), self._device())
        if kept is None:
            kept = msgspec.structs.replace(coverage, first_error=coverage.first_error or self._sink.failure)
        self.coverage = kept

    def _device(self) -> str:
        """Return the device of the model that was given, else of the first one that was called."""
        return main_device(self._names.root) if self._model_device is None else self._model_device

    def _warn(self) -> None:
        coverage = self.coverage
        if coverage is None:
            return
        problems = []
        failure = self._sink.failure
        if coverage.failed or (coverage.first_error and coverage.first_error != failure):
            what = f"{coverage.failed:,} calls are not recorded" if coverage.failed else "calls are recorded in part"
            problems.append(f"{what}. First: {coverage.first_error}")
        if failure is not None:
            problems.append(f"{failure}. What it had written until then can be read.")
        if coverage.moved_to is not msgspec.UNSET:
            problems.append(f"the folder was moved during the run, and is now {coverage.moved_to!r}.")
        for name, close in coverage.unmatched.items():
            near = f" Nearest: {', '.join(close)}." if close else ""
            problems.append(f"nothing matched {name!r}.{near}")
        if problems:
            message = f"{self.out}: " + "\n  ".join(problems)
            try:
                warnings.warn(message, CaptureIncomplete, stacklevel=3)
            except CaptureIncomplete:  # warnings are errors here; this one must not replace what the program raises
                logging.getLogger("tensorprobe").warning(message)


@public
@contextlib.contextmanager
def capture(
    out: str | os.PathLike[str],
    *,
    model: Any = None,
    overwrite: bool = False,
    steps_by: Literal["call", "optimizer", "forward"] = "call",
    level: str = "api",
    mode: Mode = "tensor",
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    phases: Names | None = None,
    directions: Names = ("forward", "backward"),
    sides: Names = ("input", "output"),
    names: Names = (),
    span: tuple[str, str] | None = None,
    ops: Names = (),
    modules: Names = (),
    inside: Names = (),
    floating_only: bool = False,
    max_bytes: int | str | None = None,
    stacks: bool | None = None,
    ring_bytes: int | str = 128 << 20,
    in_process: bool = False,
) -> Iterator[Probe]:
    """Record every call inside the `with` block into the folder `out`.

        with tensorprobe.capture("runs/a", model=model) as probe:
            for batch in loader:
                train_step(batch)
                probe.step()

    Args:
        out: folder for the run.
        model: gives modules their names; without it, the outermost module that is called does.
        overwrite: replace a run that is already in `out`. Without it, that raises RunExists.
        steps_by: `call`: a step ends with `probe.step()`. `optimizer`: it ends with `optimizer.step()`. `forward`: each
            call of the model is a step; of a generation, the prompt is step 0 and each token another.
        level: what counts as a call: `module`, `api`, `aten`, or `mix` (modules and API calls, each with its parent).
        mode: how much of each tensor to record: `summary` (statistics and digest), `tensor` (also the values) or
            `structure` (names and shapes only).
        steps, ranks: record only these, e.g. `[0, 2]` or `'0,2-4'`.
        phases: record only calls of these phases: `train`, `eval`, `generate`, `optimizer`.
        directions, sides: record only `forward` or `backward`, only the `input` or the `output`.
        names: record only calls with these names, e.g. `Functional.conv2d.1` or `Functional.conv2d.1.forward`.
        span: record only the calls from the first name to the second, both included.
        ops, modules: record only ops, or calls in modules, whose name contains this text or matches it as a glob.
        inside: record only ATen calls made inside these API calls. Needs `level="aten"`.
        floating_only: record values and statistics of floating and complex tensors only.
        max_bytes: maximum bytes of values, over all ranks, e.g. `"2G"`. After that only summaries are recorded.
        stacks: record the Python stack of each call. By default on, except in summary mode.
        ring_bytes: memory for tensors on their way to the disk. Training waits while it is full.
        in_process: write from a thread of the training process instead of a separate process.

    Errors in the settings or the folder are raised before training begins. After that, errors inside the tool are
    counted and reported by one CaptureIncomplete warning at the end. They never reach your training loop.
    """
    with Probe(**locals()) as probe:
        yield probe


def _told(error: BaseException | None) -> str:
    """`ValueError: no such batch`: an exception as one line of the record; empty for the ways to end that are none."""
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return ""
    kind = type(error).__name__
    try:
        words = " ".join(redacted(str(error).split()))
    except Exception:  # the program's own class of exception cannot say what it is
        return kind
    return f"{kind}: {words}"[:_LONGEST_ERROR].rstrip(": ")


def active_probe() -> Probe | None:
    """Return the probe that runs in this process, if any: for a script that is captured from outside and ends its own steps."""
    return _active


def watch_kernels(function: Callable[[], Any], sink: Sink, *, rank: int = 0, **settings: Any) -> Coverage:
    """Call a function and send every ATen call in it to the sink. What the function raises is passed on.

    This needs no probe, and one that runs is not disturbed.
    """
    chosen = CaptureSettings.of(level="aten", stacks=False, **settings)
    sink.check(rank)
    sink.open(rank, rank + 1, chosen)
    session = Session(sink, Selection(sides=chosen.sides))
    session.begin_step(0)
    session.recording = True
    try:
        with torch_names.heard(), DispatchTap(session, Collectives(session)):
            function()
    finally:
        session.recording = False
        kept = sink.close(session.coverage(), {}, "")
    return session.coverage() if kept is None else kept

"""One call of a run, run alone on the device and on the reference, forward and backward, and judged.

In: a recorded forward call, its recorded backward if there is one. Out: a `CallCheck`. A call that cannot be run is
skipped with the reason. An exception of the op on the device alone is a failure of the op, not of the check.
"""

from __future__ import annotations

import importlib.util
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module

import msgspec
import torch

from tensorprobe.checks.plan import Answer, Finished, Start, Task
from tensorprobe.errors import DeviceUnavailable, SettingsError, TensorprobeError, did_you_mean
from tensorprobe.judge.standards import STANDARDS
from tensorprobe.model.call import Call, Direction
from tensorprobe.model.precheck import NO_DROPOUT, CallCheck, Checked, Passed
from tensorprobe.model.reason import NotReplayed
from tensorprobe.ops import is_collective
from tensorprobe.record.run import Run
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.collectives import Collectives
from tensorprobe.replay.functions import CannotReplay, UnknownOp
from tensorprobe.replay.hard import VARIANTS, Unsuitable, make_variant
from tensorprobe.replay.inputs import Data
from tensorprobe.replay.isolation import limited, read_call
from tensorprobe.replay.once import outsized
from tensorprobe.replay.randomness import without_dropout
from tensorprobe.replay.references import use_references
from tensorprobe.replay.runs import Conditions, DeviceRaised, Runs, passed_over, prepare, said
from tensorprobe.replay.script import Script
from tensorprobe.work.pool import Reply, pack

_LARGE = 1 << 20
"""Elements of all tensors of a call from which on more than one thread is worth it. With one, sums are added up in one order."""
_BACKENDS = {"npu": "torch_npu", "hpu": "habana_frameworks.torch", "mlu": "torch_mlu", "musa": "torch_musa"}
"""Devices that torch knows of only after another package was imported."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How calls are checked. `hard` adds inputs at the edges of what the dtype holds."""

    device: str = "cpu"
    data: Data = "random"
    standard: str = "noise-aware"
    backward: bool = True
    hard: bool = False
    recorded: bool = False

    def __post_init__(self) -> None:
        if self.standard not in STANDARDS:
            raise SettingsError(
                f"no standard {self.standard!r}. There are: {', '.join(STANDARDS)}.{did_you_mean(self.standard, STANDARDS)}"
            )
        if self.data not in ("random", "real"):
            raise SettingsError(f"data is {self.data!r}; it must be random or real.")
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise DeviceUnavailable(_why_no_device(self.device, str(error).splitlines()[0])) from None

    def conditions(self, variant: str = "") -> Conditions:
        """What `Runs` needs to know of them."""
        return Conditions(self.device, self.data, self.standard, variant, self.recorded)


def _why_no_device(device: str, told: str) -> str:
    """Return why a device cannot be used, and what to do. torch names a device that it does not know by all that it knows."""
    kind, listed, known = device.partition(":")[0], "Expected one of ", " device type at start of device string"
    if not (told.startswith(listed) and known in told):
        return f"device {device!r} cannot be used: {told}"
    names = told.partition(listed)[2].partition(known)[0].split(", ")
    hint = "" if kind == "npu" else did_you_mean(kind, [*names, "npu"])
    name = "" if kind == "npu" else f" --name {kind}"
    return (
        f"device {device!r} cannot be used: torch has no device {kind!r} here.{hint}\n"
        "  Install the package that brings it (torch_npu for npu), or simulate it:\n"
        f"  tensorprobe sim{name} -- tensorprobe precheck RUN --device {device}"
    )


def check_call(
    call: StoredCall, backward: StoredCall | None, settings: CheckSettings, collectives: Collectives | None = None
) -> CallCheck:
    """The verdict on one call. With `collectives`, a collective is judged by the records of the other ranks."""
    started = time.perf_counter()
    details: list[Checked] = []
    reason = data = ""
    runs: Runs | None = None
    try:
        if collectives is not None and is_collective(call.op):
            details, data = collectives.check(call), "real"
        else:
            runs, data = prepare(call, settings.conditions())
            calm = runs.random and not settings.recorded and without_dropout(call.model) is not None
            details += _check(runs, backward, settings, "", backwards=not calm)
            if calm:
                runs = make_variant(call, runs, settings.conditions(NO_DROPOUT))
                details += _check(runs, backward, settings, NO_DROPOUT)
            if settings.hard and not runs.random:
                details += _check_variants(call, runs, backward, settings)
    except CannotReplay as found:
        reason = str(found)
        if isinstance(found, UnknownOp) and call.op.startswith(("Ops.", "Function.")) and not settings.recorded:
            reason += "; --import MODULE registers your own ops"
    except DeviceRaised as found:
        details.append(_raised(found, ""))
    forward, back = (_worst([one for one in details if one.direction == way]) for way in ("forward", "backward"))
    results: dict[Direction, Passed] = {"forward": forward, "backward": back}
    failing = [way for way, result in results.items() if result == "fail"]
    wrong = dict.fromkeys(one.message for one in details if one.result == "fail")
    left_out = dict.fromkeys(one.message for one in details if one.result == "skip" and not one.variant)
    return CallCheck(
        call=call.name,
        op=call.op,
        step=call.step,
        rank=call.rank,
        line=call.index,
        module=call.module,
        forward=forward,
        backward=back,
        message="; ".join(wrong or left_out) or reason,
        details=details,
        inside=[] if runs is None or not failing else runs.ops_inside(failing),
        elapsed_s=time.perf_counter() - started,
        data=data,
    )


def _check(
    runs: Runs, backward: StoredCall | None, settings: CheckSettings, variant: str, *, backwards: bool = True
) -> list[Checked]:
    details = runs.check_forward()
    if settings.backward and backwards:
        try:
            details += runs.check_backward(backward)
        except DeviceRaised as found:
            details.append(_raised(found, variant))
    return details


def _check_variants(
    call: StoredCall, ordinary: Runs, backward: StoredCall | None, settings: CheckSettings
) -> Iterator[Checked]:
    """The rows of every variant of the inputs; one row with the reason for each that means nothing to the op."""
    for variant in VARIANTS:
        try:
            runs = make_variant(call, ordinary, settings.conditions(variant))
            yield from _check(runs, backward, settings, variant)
        except (CannotReplay, Unsuitable) as reason:
            yield passed_over("forward", f"{variant}: {reason}", variant)
        except DeviceRaised as found:
            yield _raised(found, variant)


def _raised(found: DeviceRaised, variant: str) -> Checked:
    message = f"{variant}: {found}" if variant else str(found)
    return Checked(
        direction=found.direction, slot="", device_dtype="", reference_dtype="", shape=[], result="fail",
        judged_by="raised", measured=1.0, allowed=0.0, message=message, variant=variant,
    )  # fmt: skip


def _worst(details: list[Checked]) -> Passed:
    results = {one.result for one in details}
    return "fail" if "fail" in results else "pass" if "pass" in results else "skip"


def _import(module: str) -> None:
    """Import a module of the user's. SettingsError if that fails."""
    try:
        import_module(module)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SettingsError(
            f"module {module!r} cannot be imported in the process that runs the calls: {said}\n"
            "  Name it as in an import statement: my_package.ops. It is looked for in the current folder, too."
        ) from None


class Checker:
    """Checks one call after the other in the process that it is made in. SettingsError or RunError when run or device cannot be used.

    An exception that a check lets out becomes a skipped call with the traceback, or a failed one if the device no longer responds.
    Outside of `conditions` nothing in the process is changed.
    """

    def __init__(self, start: Start, run: Run | None = None) -> None:
        self._start = start
        _load_backend(start.device)
        use_references(start.references, start.folders)
        for module in start.imports:
            _import(module)
        self._settings = CheckSettings(
            device=start.device,
            data=start.data,  # type: ignore[arg-type]  # checked by what it is given to
            standard=start.standard,
            backward=start.backward,
            hard=start.hard,
            recorded=start.recorded,
        )
        self._run = run or start.run.open()
        self._limited = run is None and start.device == "cpu"  # in a process of its own
        self._collectives = Collectives(self._run) if start.recorded else None
        self._sizes: dict[bytes, str | None] = {}

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """Run calls with warnings off; at the end random generators, threads and warnings are as before."""
        threads = torch.get_num_threads()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def check(self, task: Task) -> Answer:
        """Return the outcome of one call."""
        try:
            call = read_call(self._run, task.step, task.rank, task.call)
            backward = None if task.backward is None else read_call(self._run, task.step, task.rank, task.backward)
        except TensorprobeError as error:
            return _skipped(task, str(error).splitlines()[0])
        except MemoryError:
            return _skipped(task, "reading its record needs more memory than a replay may have (max_replay_bytes)")
        if call.model.args is None and call.model.kwargs is None:
            return _skipped(task, NotReplayed.NO_ARGUMENTS)
        with limited(call.model, self._start.time_limit_s) if self._limited else nullcontext():
            return self._check(task, call, backward)

    def _check(self, task: Task, call: StoredCall, backward: StoredCall | None) -> Answer:
        if reason := self._outsized(call.model):
            return _skipped(task, reason)
        elements = sum(slot.count for slot in call.model.slots)
        torch.set_num_threads(self._start.threads if elements >= _LARGE else 1)
        try:
            check = check_call(call, backward, self._settings, self._collectives)
        except Exception as error:
            text = said(error)
            if not self._device_answers():
                broken = task.without_figures("fail", f"it broke {self._start.device}: {text}")
                return Answer(finished=Finished(check=broken, ends=True))
            return _skipped(task, f"the check itself failed with {text}", traceback.format_exc())
        if "fail" not in (check.forward, check.backward):
            return Answer(finished=Finished(check=check))
        script, trouble = self._script(call, backward, check)
        finished = Finished(check=check, trouble=trouble, ends=not self._device_answers())
        if script is None:
            return Answer(finished=finished)
        return Answer(finished=finished, script=script.text, tensors=script.tensors)

    def _outsized(self, call: Call) -> str | None:
        """Return why a call is not run. Calls of equal shapes and arguments have equal results but for their values."""
        shapes = [(slot.name, slot.dtype, slot.shape, slot.stride, slot.grad) for slot in call.slots]
        try:
            key = msgspec.json.encode((call.op, call.args, call.kwargs, shapes))
        except RecursionError:  # arguments nested beyond reason
            return outsized(call, self._start.max_replay_bytes)
        if key not in self._sizes:
            self._sizes[key] = outsized(call, self._start.max_replay_bytes)
        return self._sizes[key]

    def _script(self, call: StoredCall, backward: StoredCall | None, check: CallCheck) -> tuple[Script | None, str]:
        """Return the script of a failing call, or what went wrong. The call fails either way."""
        if not self._start.save_failures or is_collective(call.op):
            return None, ""
        try:
            from tensorprobe.replay.failures import failure_script

            return failure_script(call, backward, self._settings.conditions(), check, self._start.imports), ""
        except Exception:
            return None, f"{call.name} could not be saved.\n{traceback.format_exc()}"

    def _device_answers(self) -> bool:
        """Return whether the device still computes: after some errors everything fails that comes later."""
        try:
            return self._start.device == "cpu" or torch.ones(2, device=self._start.device).sum().item() == 2.0
        except Exception:
            return False


def _skipped(task: Task, reason: str, trouble: str = "") -> Answer:
    return Answer(finished=Finished(check=task.without_figures("skip", reason), trouble=trouble))


def _load_backend(device: str) -> None:
    package = _BACKENDS.get(device.partition(":")[0])
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is not None:
        import_module(package)


@contextmanager
def serve_checks(start: bytes, _progress: object) -> Iterator[object]:
    """Answer tasks; a target of `work.pool`."""
    checker = Checker(msgspec.msgpack.decode(start, type=Start))

    def answer(parcel: bytes) -> Reply:
        found = checker.check(msgspec.msgpack.decode(parcel, type=Task))
        return Reply(pack(found), found.finished.ends)

    with checker.conditions():
        yield answer

"""Which calls of a run are checked, and what processes that check them are sent and return. Nothing runs here.

In: a run and what was asked for. Out: the distinct forward calls in the order of the record, each with its recorded
backward and with the calls that it stands for. Every candidate is in exactly one of them.

Two calls are equal if op, arguments, and dtype, shape, stride and grad of every input are equal, and the dtypes of the outputs
(autocast shows nowhere else). With real data the values must be equal too, and in an audit those of the results. A
recomputed call is equal to its original; an audit judges it by itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from tensorprobe.checks.settings import Asked
from tensorprobe.errors import NoData, NotFound, RunDamaged, nearest
from tensorprobe.model import Call
from tensorprobe.model.call import Frame, device_of, forward_name
from tensorprobe.model.precheck import CallCheck, Passed
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record.lines import Damage
from tensorprobe.record.names import is_inside, name_fits
from tensorprobe.record.run import Entry, Run
from tensorprobe.replay.isolation import RunPlace
from tensorprobe.text import counted, ranges


class Task(msgspec.Struct, frozen=True):
    """Where a call and its backward stand in the run: all that a process needs to be told."""

    step: int
    rank: int
    call: Entry
    backward: Entry | None

    def without_figures(self, forward: Passed, message: str) -> CallCheck:
        """What is said of the call when its check did not come to an end."""
        name = self.call.name
        return CallCheck(
            call=name,
            op=name.rsplit(".", 2)[0],
            step=self.step,
            rank=self.rank,
            line=self.call.line,
            module="",
            forward=forward,
            backward="skip",
            message=message,
            details=[],
        )


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a process that checks calls needs before its first call."""

    run: RunPlace
    device: str
    data: str
    standard: str
    backward: bool
    hard: bool
    recorded: bool
    threads: int
    """For large calls. Small ones have one thread, so that their figures do not depend on the number of processes."""
    max_replay_bytes: int
    time_limit_s: float
    save_failures: bool
    references: dict[str, str] = {}
    """Op → `module:function` that computes it on the CPU, and where modules are imported from."""
    folders: list[str] = []
    imports: tuple[str, ...] = ()
    """Modules that register ops of the user's."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one call; one line of the journal."""

    check: CallCheck
    replay: str = ""
    """The script that was saved for a failing call."""
    trouble: str = ""
    """What went wrong in the check itself, or in saving a failure."""
    ends: bool = False
    """The device no longer responds: the process ends after this."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process returns for one call. The files of a failing call are written by the process that asked."""

    finished: Finished
    script: str = ""
    tensors: bytes = b""
    begun: bool = True
    """False for a call that was given up: whoever resumes tries it."""


class Planned(msgspec.Struct, frozen=True):
    """One call that is run, and what the report says of it besides the result."""

    task: Task
    module: str
    source: Frame | None
    equal: list[str]


@dataclass
class Plan:
    """The checks in the order of the record."""

    checks: list[Planned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    device: str = "cpu"
    """The kind of device that the calls were recorded on."""
    left_out: int = 0
    """Calls that are not in the sample."""

    def digest(self) -> str:
        """Of all that is planned: another run, or the same one recorded again, has another."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self.checks))


class _Seen(NamedTuple):
    """What the plan remembers of a candidate."""

    entry: Entry
    key: bytes
    grads: int
    module: str
    stack: int | None
    leads: bool = True
    """Whether the recorded backward belongs to it, and not to its repetition."""


def plan_checks(run: Run, asked: Asked) -> Plan:
    """The plan; NotFound when a call, step or rank asked for is not there, NoData for real data where none were recorded."""
    plan = Plan()
    places = _places(run, asked, plan)
    patterns = {text: _spellings(text) for text in asked.calls or ()}
    distinct: dict[bytes, Planned] = {}
    reading = _Reading(values=asked.data == "real", results=asked.recorded)
    for step, rank in places:
        lines = None if asked.span is None else _lines_of(run, step, rank, asked.span, reading.fitted)
        for best, others in reading.candidates(run, step, rank):
            name = best.entry.name
            ends = [best.entry, *([reading.backwards[name][0]] if best.leads and name in reading.backwards else [])]
            if lines is not None and not any(entry.line in lines for entry in ends):
                continue
            fitting = [text for text, spelled in patterns.items() if _fits(name, spelled)]
            if patterns and not fitting:
                continue
            reading.fitted.update(fitting)
            if asked.modules is not None and not any(is_inside(best.module, each) for each in asked.modules):
                continue
            if asked.sample is not None and not _is_drawn(f"{name} {step} {rank} {best.entry.repeat}", asked.sample):
                plan.left_out += 1
                continue
            backward = reading.backwards.get(name) if best.leads else None
            key = best.key + (backward[1] if backward is not None else b"")
            same = distinct.get(key) if asked.dedupe else None
            place = (step, rank) if len(places) > 1 else None
            repeats = [_label(name, place, other.entry.repeat) for other in others]
            if same is not None:
                same.equal.extend([_label(name, place), *repeats])
                continue
            task = Task(step, rank, best.entry, None if backward is None else backward[0])
            planned = Planned(task, best.module, reading.source(run, step, rank, best.stack), repeats)
            distinct.setdefault(key, planned)
            plan.checks.append(planned)
    if plan.left_out:
        plan.notes.append(f"{counted(plan.left_out, 'call')} not in the sample of {asked.sample:g}")
    plan.device = reading.device
    plan.notes += reading.notes(asked)
    _demand_names(run, reading, [*patterns, *(asked.span or ())], places)
    if asked.data == "real" and plan.checks and reading.tensors and not reading.held:
        raise NoData(
            f"'{run.path}' holds no values, so there are no real data to check with.\n"
            + ("  Capture" if asked.recorded else "  Use --data random, or capture")
            + " with mode='tensor'."
        )
    return plan


class _Reading:
    """Reads the candidates of one step and rank after the other, and counts what it passes over."""

    def __init__(self, *, values: bool, results: bool) -> None:
        self._values, self._results = values, results
        self.backwards: dict[str, tuple[Entry, bytes]] = {}
        """The recorded backward of each forward call of the step and rank at hand, and what tells its values."""
        self.names: set[str] = set()
        self.fitted: set[str] = set()
        self.tensors = self.held = 0
        self.device = "cpu"
        """The first that is not the CPU."""
        self._modules = 0
        self._damage: list[Damage] = []
        self._lost_stacks: dict[tuple[int, int], str] = {}

    def candidates(self, run: Run, step: int, rank: int) -> Iterator[tuple[_Seen, list[_Seen]]]:
        """Each forward call with those that repeat it. At ATen level what runs in the backward pass is a call like any other.

        Of an original and its recomputation that one stands for both which has more inputs with a gradient: activation
        checkpointing runs the original without.
        """
        self.backwards = {}
        seen: dict[str, list[_Seen]] = {}
        for item in run.segment(step, rank).calls():
            if isinstance(item, Damage):
                self._damage.append(item)
                continue
            line, call = item
            entry = Entry(line, call.name, call.repeat)
            if not call.level.is_op:
                self._modules += call.direction == "forward"
            elif call.direction == "backward" and call.level.links_backward:
                self.backwards.setdefault(forward_name(call.name), (entry, self._told_by_values(call)))
            else:
                grads = sum(slot.grad for slot in call.slots)
                if self.device == "cpu":
                    self.device = device_of(call)
                seen.setdefault(call.name, []).append(
                    _Seen(entry, self._key(call, line), grads, call.module, call.stack)
                )
        self.names.update(seen)
        for name, calls in seen.items():
            best = max(calls, key=lambda one: one.grads)  # the first of equally good ones
            if self._results and name in self.backwards:  # the backward uses what the last one before it has kept
                before = [one for one in calls if one.entry.line < self.backwards[name][0].line]
                best = max(reversed(before), key=lambda one: one.grads, default=best)
            others = [one for one in calls if one is not best]
            if not self._results:
                yield best, others
                continue
            yield best, []
            for other in others:
                yield other._replace(leads=False), []

    def source(self, run: Run, step: int, rank: int, stack: int | None) -> Frame | None:
        """The line of the user's program that made a call."""
        try:
            found = None if stack is None else run.segment(step, rank).stack(stack)
        except RunDamaged as damage:
            self._lost_stacks[step, rank] = str(damage)
            return None
        return found.frames[0] if found is not None and found.frames else None

    def notes(self, asked: Asked) -> list[str]:
        """What was passed over."""
        notes = list(self._lost_stacks.values())
        if self._modules:
            calls, what = counted(self._modules, "call"), "audited" if asked.recorded else "run"
            notes.append(f"{calls} of a module not {what} as a whole, only the recorded calls inside")
        if self._damage:
            lines = counted(len(self._damage), "damaged line")
            notes.append(f"{lines} of the run skipped, the first: {self._damage[0]}")
        return notes

    def _key(self, call: Call, line: int) -> bytes:
        inputs = [slot for slot in call.slots if slot.side != "output"]
        self.tensors += len(inputs)
        self.held += sum(slot.has_data for slot in inputs)
        facts = (
            call.op,
            call.args,
            call.kwargs,
            [(slot.name, slot.dtype, slot.shape, slot.stride, slot.grad, slot.skipped) for slot in inputs],
            [(slot.name, slot.dtype) for slot in call.slots if slot.side == "output"],
        )
        try:
            described = msgspec.json.encode(facts)
        except RecursionError:  # arguments nested beyond reason: equal to nothing
            described = f"line {line}".encode()
        return xxhash.xxh3_128_digest(described) + self._told_by_values(call)

    def _told_by_values(self, call: Call) -> bytes:
        """Tells calls with other values apart, where these matter; values without a digest are equal to no others."""
        if not self._values:
            return b""
        digests = [
            slot.digest or f"{call.name} {slot.name}"
            for slot in call.slots
            if (self._results or slot.side != "output") and slot.has_data
        ]
        return xxhash.xxh3_128_digest("\n".join(digests).encode())


def _places(run: Run, asked: Asked, plan: Plan) -> list[tuple[int, int]]:
    """The steps and ranks that are looked at: of steps the first (in an audit all), unless others were asked for."""
    for step in asked.steps or ():
        run.segments(step)  # each that was asked for must be there
    for rank in asked.ranks or ():
        run.segments(rank=rank)
    first = run.steps if asked.recorded else run.steps[:1]
    steps = asked.steps if asked.steps is not None else first
    if asked.steps is None and len(run.steps) > len(first):
        plan.notes.append(f"only step {run.steps[0]} of steps {ranges(run.steps)} was checked; choose with --steps")
    return [key for key in run.segments() if key[0] in steps and (asked.ranks is None or key[1] in asked.ranks)]


def _spellings(pattern: str) -> set[str]:
    """A name as given, that of the forward call when it is of a backward one, and in our spelling when it has another's."""
    spelled = {pattern, str(parse_call_name(pattern))}
    return spelled | {forward for name in spelled if (forward := forward_name(name))}


def _fits(name: str, patterns: set[str]) -> bool:
    return any(name_fits(name, pattern) for pattern in patterns)


def _lines_of(run: Run, step: int, rank: int, span: Sequence[str], fitted: set[str]) -> range:
    """Return the lines from the first call that fits the first name to the last that fits the second; none without both."""
    found = []
    for name in span:
        spelled = {name, str(parse_call_name(name))}
        found.append([entry.line for entry in run.segment(step, rank).index().entries if _fits(entry.name, spelled)])
        fitted.update([name] if found[-1] else [])
    return range(found[0][0], found[1][-1] + 1) if all(found) else range(0)


def _is_drawn(key: str, share: float) -> bool:
    return bool(xxhash.xxh3_64_intdigest(key.encode()) < share * 2**64)


def _demand_names(run: Run, reading: _Reading, patterns: Sequence[str], places: Sequence[tuple[int, int]]) -> None:
    for text in patterns:
        if text not in reading.fitted:
            close = nearest(text, reading.names)
            steps = sorted({step for step, _ in places})
            shown = f"{shlex.quote(str(run.path))} --step {steps[0] if steps else 0}"
            hint = f"Nearest: {', '.join(close)}" if close else f"List them: tensorprobe inspect {shown}"
            at = ranges(steps)
            raise NotFound(f"no call that can be run fits {text!r} in step {at or '(none)'} of '{run.path}'.\n  {hint}")


def _label(name: str, place: tuple[int, int] | None, repeat: int | None = None) -> str:
    """The name of a call, with what tells it from others of that name."""
    facts = [] if place is None else [f"step {place[0]}", f"rank {place[1]}"]
    facts += [] if repeat is None else [f"repeat {repeat}"]
    return f"{name} ({', '.join(facts)})" if facts else name

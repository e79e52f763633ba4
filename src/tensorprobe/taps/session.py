"""What the taps of one probe share: the step, the numbers of calls, where each thread is, and the counts.

Every tap hands its calls to `emit`, which hands them to the sink. Errors of the tool are counted here and never reach the
program.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from copy import copy
from typing import Any, NamedTuple

import msgspec

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, describe_result
from tensorprobe.model import Coverage, Level
from tensorprobe.model.event import Event
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.sink import Sink
from tensorprobe.taps.backward import (
    Boundary,
    Edges,
    Gradients,
    SlotIndices,
    TakeGradients,
    Watch,
    WholeBackward,
    find_boundary,
    find_roots,
    install,
)
from tensorprobe.taps.select import Selection, Wanted, backward_of
from tensorprobe.taps.stacks import OuterStack, StackBook
from tensorprobe.taps.thread_state import Recompute, ThreadState
from tensorprobe.taps.training import OPTIMIZER, Training
from tensorprobe.taps.unwritten import Unwritten

NODE_KEY = "tensorprobe"


_MOST_FAILURES = 1000
"""After this many failures, if most calls fail, recording stops and the program continues at full speed."""


class OpenCall(msgspec.Struct):
    """A call in progress: its event, and what only the taps need."""

    event: Event
    backward_name: str
    wanted: Wanted
    step: int
    inputs: Tensors = []
    versions: list[int] = []
    edges: Edges = {}
    roles: dict[str, str] = {}
    """Slot → role of the gradients of its inputs, where that is known already."""
    start: int = -1
    """The sequence number of autograd when the call began. -1: its backward is not followed."""


class Origin(NamedTuple):
    """Stored in the metadata of an autograd node: the outermost call whose backward it is, and the calls within that."""

    call: str
    module: str
    stack: int | None
    era: object
    """The session and step that the stack number belongs to. The backward may run in another."""
    within: tuple[str, ...] = ()
    microbatch: int | None = None


_ONLY_BACKWARD = Wanted(False, True)
_live: list[weakref.ref[Session]] = []
"""No WeakSet: it forgets objects in a callback, and Python ignores what a signal handler raises in one."""


class Session:
    """One probe at work. `recording` is false between the wanted steps, after the end, and in a forked child."""

    def __init__(self, sink: Sink, selection: Selection, stacks: StackBook | None = None) -> None:
        rules = sink.needs.rules
        self.sink = sink
        self.selection = selection
        self.recording = False
        self.forked = self.ended = False
        self.over = False
        """Whether the sink has ended the session: no further step begins."""
        self._numbers_go_on = rules.numbers_go_on
        self._only_given = rules.only_given
        self.step, self.era = 0, object()
        self.state = ThreadState()
        self.blind_spots: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.recorded = self.filtered = self.failed = 0
        self.first_error: str | None = None
        self.stacks = stacks
        self._first_numbers = dict(rules.numbers)
        self._numbers: dict[str, int] = {}
        self._repeats: dict[str, int] = {}
        self._threads = 0
        self._open_watches: dict[int, list[Watch]] = {}
        self._lock = threading.Lock()
        self.unwritten = Unwritten(self._take_note)
        self.training: Training | None = None
        self.record_whole: WholeBackward | None = None  # C code that holds this session: `end` lets go of it
        take = self._take
        self.wants_all = selection.everything()
        self._takes = (take if selection.inputs else _take_nothing, take if selection.outputs else _take_nothing)
        _live[:] = [known for known in _live if known() is not None] + [weakref.ref(self)]

    def _take_note(self, note: str) -> None:
        self.notes[note] += 1

    def take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Any]:
        """Have the sink take the tensors of a forward call as they are now. Uninitialised memory is left out."""
        if self.unwritten.blocks:
            slots = self.unwritten.take(self.sink.take, tensors, but, reason)
        else:
            slots = self.sink.take(tensors, but=but, reason=reason)
        if self.training is not None:
            self.training.mark(tensors, slots, outside=not self.state.modules)
        return slots

    def _take(self, tensors: Tensors, *, but: tuple[str, ...] = (), reason: str = "") -> list[Any]:
        if self.unwritten.blocks:
            return self.unwritten.take(self.sink.take, tensors, but, reason)
        return self.sink.take(tensors, but=but, reason=reason)

    def coverage(self) -> Coverage:
        """Return the counts as they are now."""
        return Coverage(
            seen=self.recorded + self.filtered + self.failed,
            recorded=self.recorded,
            filtered=self.filtered,
            failed=self.failed,
            slots=self.sink.slots_taken,
            slots_skipped=dict(self.sink.slots_skipped),
            bytes_seen=self.sink.bytes_seen,
            blind_spots=dict(self.blind_spots),
            unmatched=self.selection.unmatched(),
            notes=[f"{note} ({count} times)" for note, count in self.notes.items()],
            first_error=self.first_error,
            limits=torch_names.limits(),
        )

    def pass_by_tracing(self) -> None:
        """Count a call made while torch.jit traces. Its shapes are not numbers then, and nothing can be recorded."""
        self.blind_spots["tracing (torch.jit.trace): calls during tracing are not recorded"] += 1

    def pass_by_compiled(self) -> None:
        """Count a run of compiled code that the modes cannot be on for."""
        self.blind_spots["compiled code (torch.compile): calls inside are not seen"] += 1

    def begin_step(self, step: int) -> None:
        """Start numbering from 0 again."""
        self.step, self.era = step, object()
        with self._lock:
            if self._first_numbers or not self._numbers_go_on:
                self._numbers, self._first_numbers = self._first_numbers, {}
            self._repeats = {}
        self.selection.begin_step()
        if self.stacks is not None:
            self.stacks.clear()
        self.sink.begin_step(step)

    def number(self, op: str, recompute: Recompute | None) -> int:
        """Return the next number of an op.

        Threads are not switched, and no exception comes from outside, between reading and writing: nothing is called.
        """
        numbers = self._numbers if recompute is None else recompute.numbers
        try:
            number = numbers[op]
        except KeyError:
            number = 0
        numbers[op] = number + 1
        return number

    def take_number_back(self, op: str, recompute: Recompute | None, number: int) -> None:
        """Give the number of a call that was interrupted before it was made to the next one."""
        numbers = self._numbers if recompute is None else recompute.numbers
        if numbers.get(op) == number + 1:
            numbers[op] = number

    def repetition(self) -> Recompute | None:
        """Return the forward that this thread recomputes, unless it is in a backward started inside that."""
        recompute = self.state.recompute
        return recompute if recompute is None or recompute.task == torch_names.graph_task() else None

    def numbers_now(self) -> dict[str, int]:
        """Return the next number of each op, for a forward that may be recomputed."""
        recompute = self.repetition()
        with self._lock:
            return dict(self._numbers if recompute is None else recompute.numbers)

    def begin_call(self, op: str, level: Level, *, module: str | None = None) -> OpenCall | None:
        """Number a forward call of a module or an API. None when it is not wanted."""
        state = self.state
        recompute = None if state.recompute is None else self.repetition()
        number = self.number(op, recompute)
        try:
            name, back = level.call_names(op, number)
            modules = state.modules
            path = module if module is not None else modules[-1] if modules else ""
            wanted = self.wants_all or self.selection.wants(op, name, back, path, state.calls, state.phase)
            if not (wanted.forward or wanted.backward):
                self.filter_out()
                return None
            event = self._event(state, recompute, level, name, path)
            return OpenCall(event, back, wanted, self.step)
        except BaseException:
            self.take_number_back(op, recompute, number)
            raise

    def cancel(self, op: str, event: Event) -> None:
        """Forget a call that was interrupted from outside before it was made."""
        self.take_number_back(
            op, self.repetition(), next(int(part) for part in reversed(event.name.split(".")) if part.isdigit())
        )
        self.sink.drop(event.slots)

    def aten_event(self, op: str, *, backward: bool, origin: Origin | None) -> Event | None:
        """Number an ATen call, which has a direction of its own. `origin` is the call whose backward it belongs to."""
        direction = "backward" if backward else "forward"
        recompute = self.repetition()
        number = self.count_aten(op, backward=backward)
        try:
            name = f"{op}.{number}.{direction}"
            path = self.module_path() if origin is None else origin.module
            phase = self.state.phase or ("train" if backward else "")  # the engine has threads of its own
            wanted = self.selection.wants(op, name, name, path, self.state.calls, phase)
            enclosing = self.state.calls if origin is None else [*self.state.calls, origin.call, *origin.within]
            if not (wanted.backward if backward else wanted.forward) or not self.selection.wants_inside(enclosing):
                self.filter_out()
                return None
            return self._event(self.state, recompute, Level.ATEN, name, path, origin)
        except BaseException:
            self.take_number_back(f"{op}:{direction}", recompute, number)
            raise

    def count_aten(self, op: str, *, backward: bool) -> int:
        """Return the next number of an ATen op in its direction."""
        return self.number(f"{op}:{'backward' if backward else 'forward'}", self.repetition())

    def enclosing_call(self, op: str) -> OpenCall:
        """Number an API call that is not recorded itself. The ATen calls made in it belong to it."""
        recompute = self.repetition()
        number = self.number(op, recompute)
        name, back = Level.API.call_names(op, number)
        self.selection.enter(name, back)
        event = self._event(self.state, recompute, Level.API, name, self.module_path())
        return OpenCall(event, back, _ONLY_BACKWARD, self.step)

    def module_path(self) -> str:
        """Return the path of the innermost module this thread is in."""
        modules = self.state.modules
        return modules[-1] if modules else ""

    def _event(
        self,
        state: ThreadState,
        recompute: Recompute | None,
        level: Level,
        name: str,
        path: str,
        origin: Origin | None = None,
    ) -> Event:
        if state.ordinal is None:
            self._enter_thread(state)
        repeat = 0 if recompute is None else self.repeat(name)
        if origin is not None:
            stack = origin.stack if origin.era is self.era else None
        elif level is Level.ATEN and state.call_stack is not None:
            stack = state.call_stack  # that of the API call it is made in
        else:
            stack = None if self.stacks is None else self.stacks.current(self.sink, state.outer_stack)
        parent = state.calls[-1] if state.calls else state.region
        call = None if origin is None else origin.call
        phase, training, microbatch = state.phase, self.training, None
        if training is not None and phase is not OPTIMIZER:
            about = origin or recompute
            microbatch = training.microbatch if about is None else about.microbatch
        return Event(name, level, path, parent, call, stack, state.ordinal or 0, repeat, phase, microbatch)

    def note_result(self, call: OpenCall, result: Any) -> None:
        """Note what a call has returned, None and numbers too."""
        if self._only_given:
            call.event.result = describe_result(result)

    def emit(self, event: Event) -> None:
        """Hand a call that has ended to the sink."""
        self.sink.call(event)
        self.recorded += 1

    def is_handed_over(self, event: Event) -> bool:
        """Return, after an interruption, whether the sink has this call. If not, forget its outputs: they are taken again."""
        if self.sink.has(event):
            return True
        event.slots = [slot for slot in event.slots if not slot.name.startswith("output")]
        return False

    def emit_backward(self, watch: Watch, slots: list[Any]) -> None:
        """Hand over what a watch has seen in one pass of the engine."""
        for slot in slots if watch.roles else ():
            slot.role = watch.roles.get(slot.name, "")
        event = copy(watch.about)
        event.repeat, event.slots = self.repeat(event.name) - 1, slots
        self.emit(event)

    def watch_backward(self, call: OpenCall, outputs: Tensors) -> None:
        """Follow the gradients of a call, if it made nodes and its backward is wanted."""
        recompute = self.repetition()
        if not call.wanted.backward or (recompute is not None and not recompute.keeps_graph):
            return
        roots = find_roots(outputs, call.start)
        if roots:
            self.watch_nodes(call, roots, find_boundary(roots, call.edges, call.start))

    def watch_nodes(self, call: OpenCall, roots: dict[Any, SlotIndices], boundary: Boundary) -> None:
        """Follow the gradients of a call whose nodes are known."""
        forward = call.event
        parent = None if forward.parent is None else backward_of(forward.parent)
        about = Event(call.backward_name, forward.level, forward.module, parent, None, forward.stack, forward.thread)
        about.phase, about.microbatch = forward.phase, forward.microbatch
        watch = Watch(about, call.step, self._takes, self.emit_backward, self.record_whole)
        if self.training is not None:
            watch.roles = call.roles or self.training.gradient_roles(call.inputs)
        install(watch, roots, boundary, self._in_hook)

    def mark_nodes(self, call: OpenCall, outputs: Tensors) -> None:
        """Store in each node which call it belongs to, for the ATen calls of its backward."""
        roots = find_roots(outputs, call.start)
        if roots:
            for node in find_boundary(roots, call.edges, call.start).nodes:
                inner: Origin | None = node.metadata.get(NODE_KEY)
                within = () if inner is None else (inner.call, *inner.within)
                node.metadata[NODE_KEY] = self.origin(call, within)

    def origin(self, call: OpenCall, within: tuple[str, ...] = ()) -> Origin:
        """Return what the nodes of a call hold."""
        event = call.event
        return Origin(call.backward_name, event.module, event.stack, self.era, within, event.microbatch)

    def _in_hook(self, watch: Watch, take: TakeGradients, gradients: tuple[Gradients, ...]) -> None:
        """Run tool code inside the autograd engine."""
        state = self.state
        if not self.recording or state.busy:
            self._tell_successor()
            return
        if watch.step != self.step:
            self.notes["backward of a call from an earlier step, not recorded"] += 1
            return
        guard = torch_names.no_overrides()
        try:
            state.busy = True
            with guard:
                task = torch_names.graph_task()
                if not watch.is_wanted(task, self.selection.wants_backward_now):
                    return
                if take(task, gradients):
                    self._expect_end(task, watch)
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            self.tool_failed(watch.about.name, error)
        finally:
            state.busy = False

    def _tell_successor(self) -> None:
        """Note in the current recording that it lacks a gradient, which belongs to one that has ended."""
        if not self.ended:
            return
        for session in _sessions():
            if session.recording:
                session.notes["gradient of a call that was made before this recording began, not recorded"] += 1

    def _expect_end(self, task: int, watch: Watch) -> None:
        """When the engine has finished, let a watch that lacks gradients hand over what it has."""
        watches = self._open_watches.get(task)
        if watches is None:
            watches = self._open_watches[task] = []
            torch_names.at_end_of_backward(lambda: self._end_of_backward(task))
        watches.append(watch)

    def _end_of_backward(self, task: int) -> None:
        watches = self._open_watches.pop(task, ())
        busy, self.state.busy = self.state.busy, True
        try:
            with torch_names.no_overrides():
                for watch in watches if self.recording else ():
                    watch.finish(task)
        except Exception as error:
            self.tool_failed("end of backward", error)
        finally:
            self.state.busy = busy

    def tool_failed(self, where: str, error: BaseException) -> None:
        """Count a failure of the tool and remember the first. What the program itself raised into our code is raised again."""
        let_through(error)
        self.failed += 1
        if self.first_error is None:
            self.first_error = f"{where}, step {self.step}: {type(error).__name__}: {error}"
        if self.failed >= _MOST_FAILURES and self.failed > self.recorded and self.recording:
            self.recording, self.over = False, True
            self.notes["recording stopped: most calls failed"] += 1

    def enter_region(self, region: str | None) -> None:
        """Set the region of the step for what this thread calls outside of modules from now on."""
        self.state.region = region

    def outer_stack(self, outer: OuterStack | None) -> OuterStack | None:
        """Return the stack of the module tap's caller. Call it from the frame that stays until the module has returned."""
        if self.stacks is None:
            return None
        frame = sys._getframe(1)
        return OuterStack(frame, self.stacks.walk(frame.f_back, outer))

    def filter_out(self) -> None:
        """Count a call that is not wanted."""
        self.filtered += 1

    def end(self) -> None:
        """Record nothing from now on."""
        self.recording, self.ended, self.record_whole = False, True, None

    def end_step(self, *, whole: bool) -> None:
        """Let the sink finish the step. Its own computations are not recorded."""
        busy, self.state.busy = self.state.busy, True
        try:
            with torch_names.no_overrides():
                self.sink.end_step(whole=whole)
        except Exception as error:
            self.tool_failed("end of step", error)
        finally:
            self.state.busy = busy

    def discard(self, event: Event) -> None:
        """Forget a call that began and turns out not to be wanted."""
        self.filter_out()
        self.sink.drop(event.slots)

    def repeat(self, name: str) -> int:
        """Count a call of this name in this step, which may come several times; return how many that makes."""
        repeat = self._repeats[name] = self._repeats.get(name, 0) + 1
        return repeat

    def _enter_thread(self, state: ThreadState) -> None:
        with self._lock:
            state.ordinal = self._threads
            self._threads += 1


def _take_nothing(tensors: Tensors) -> list[Any]:
    return []


def _sessions() -> list[Session]:
    return [session for known in list(_live) if (session := known()) is not None]


def _stop_in_child() -> None:
    """Record nothing in a forked child (a DataLoader worker): it inherits the taps but not the recorder."""
    for session in _sessions():
        session.recording = False
        session.forked = True


os.register_at_fork(after_in_child=_stop_in_child)

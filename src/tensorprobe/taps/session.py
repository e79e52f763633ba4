"""What the taps of one probe share while it records: the step, the numbers of calls, where each thread is, and the counts.

Every tap hands its calls to `emit`. Code of the tool that fails is counted here and never reaches the training.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors
from tensorprobe.model import Coverage, Level
from tensorprobe.record.writer import RunWriter
from tensorprobe.taps.backward import Edges, Watch, find_boundary, find_roots, install
from tensorprobe.taps.late import LateSummaries
from tensorprobe.taps.select import Selection, Wanted, backward_of
from tensorprobe.taps.sinks import Sink, Taker
from tensorprobe.taps.stacks import OuterStack, StackBook

NODE_KEY = "tensorprobe"


_MOST_FAILURES = 1000
"""After so many failures, if they are most of the calls, recording stops and the program goes on at full speed."""


class Header(NamedTuple):
    """All that is known of a call but its tensors."""

    level: Level
    module: str
    parent: str | None
    origin: str | None
    stack: int | None
    thread: int
    repeat: int
    step: int
    name: str
    backward_name: str
    wanted: Wanted


class Origin(NamedTuple):
    """Written on an autograd node: the call whose backward it is, the outermost one, and those within it."""

    call: str
    module: str
    stack: int | None
    era: object
    """The session and step that the number of the stack belongs to: a graph may be walked back in another."""
    within: tuple[str, ...] = ()


class Recompute(NamedTuple):
    """A forward that is being run again: it takes its numbers from what they were the first time.

    `task` is the pass of the engine it is run in. A backward that is started inside it is a pass of its own, and no repetition.
    """

    numbers: dict[str, int]
    keeps_graph: bool
    task: int


class ThreadState(threading.local):
    """Where one thread is."""

    def __init__(self) -> None:
        self.busy = False
        self.modules: list[str] = []
        self.calls: list[str] = []
        self.recompute: Recompute | None = None
        self.ordinal: int | None = None
        self.outer_stack: OuterStack | None = None
        self.call_stack: int | None = None


_live: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """One probe at work. `recording` is false between the wanted steps, after the end, and in a child, which is `forked`."""

    def __init__(
        self, writer: RunWriter | Sink, snapshots: Taker, selection: Selection, stacks: StackBook | None
    ) -> None:
        self.writer = writer
        self.snapshots = snapshots
        self.selection = selection
        self.recording = False
        self.forked = self.ended = False
        self.over = False
        """Whether a sink has ended it: no step begins any more."""
        self.numbers_go_on = False
        self.step, self.era = 0, object()
        self.state = ThreadState()
        self.blind_spots: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.recorded = self.filtered = self.failed = 0
        self.first_error: str | None = None
        self._stacks = stacks
        self.first_numbers: dict[str, int] = {}
        """What the numbers of the first step begin with."""
        self._numbers: dict[str, int] = {}
        self._repeats: dict[str, int] = {}
        self._threads = 0
        self._open_watches: dict[int, list[Watch]] = {}
        self._lock = threading.Lock()
        take = snapshots.take
        self._takes = (take if selection.inputs else _take_nothing, take if selection.outputs else _take_nothing)
        self._late = LateSummaries(writer)
        self._hand_over = self._late.call if snapshots.summary_only else writer.call
        _live.add(self)

    def coverage(self) -> Coverage:
        """The counts as they are now."""
        return Coverage(
            seen=self.recorded + self.filtered + self.failed,
            recorded=self.recorded,
            filtered=self.filtered,
            failed=self.failed,
            slots=self.snapshots.slots,
            slots_skipped=dict(self.snapshots.skipped),
            bytes_seen=self.snapshots.bytes_seen,
            blind_spots=dict(self.blind_spots),
            unmatched=self.selection.unmatched(),
            notes=[*(f"{note} ({count} times)" for note, count in self.notes.items()), *torch_names.limits()],
            first_error=self.first_error,
        )

    def pass_by_tracing(self) -> None:
        """A call was made while torch.jit traced: its shapes are no numbers then, and nothing can be recorded."""
        self.blind_spots["tracing (torch.jit.trace): calls made meanwhile are not recorded"] += 1

    def begin_step(self, step: int) -> None:
        """Numbers start again from 0."""
        self.step, self.era = step, object()
        with self._lock:
            if self.first_numbers or not self.numbers_go_on:
                self._numbers, self.first_numbers = self.first_numbers, {}
            self._repeats = {}
        self.selection.begin_step()
        if self._stacks is not None:
            self._stacks.clear()
        self.writer.step(step)

    def number(self, op: str, recompute: Recompute | None) -> int:
        """The next number of an op."""
        numbers = self._numbers if recompute is None else recompute.numbers
        with self._lock:
            number = numbers.get(op, 0)
            numbers[op] = number + 1
        return number

    def repetition(self) -> Recompute | None:
        """The forward this thread is running again, when it is in that and not in a backward started inside it."""
        recompute = self.state.recompute
        return recompute if recompute is None or recompute.task == torch_names.graph_task() else None

    def numbers_now(self) -> dict[str, int]:
        """What the next numbers are, for a forward that may be run again."""
        recompute = self.repetition()
        with self._lock:
            return dict(self._numbers if recompute is None else recompute.numbers)

    def header(self, op: str, level: Level, *, module: str | None = None) -> Header | None:
        """Count a forward call of a module or an API; its header, or None when it is not wanted."""
        state = self.state
        recompute = None if state.recompute is None else self.repetition()
        number = self.number(op, recompute)
        name, back = level.call_names(op, number)
        modules = state.modules
        path = module if module is not None else modules[-1] if modules else ""
        wanted = self.selection.wants(op, name, back, path, state.calls)
        if not (wanted.forward or wanted.backward):
            self.filter_out()
            return None
        return self._header(state, recompute, level, name, back, path, wanted)

    def aten_header(self, op: str, *, backward: bool, origin: Origin | None) -> Header | None:
        """Count an ATen call, which has a direction of its own; `origin` is what it is the backward of."""
        direction = "backward" if backward else "forward"
        recompute = self.repetition()
        name = f"{op}.{self.count_aten(op, backward=backward)}.{direction}"
        path = self.module_path() if origin is None else origin.module
        wanted = self.selection.wants(op, name, name, path, self.state.calls)
        enclosing = self.state.calls if origin is None else [*self.state.calls, origin.call, *origin.within]
        if not (wanted.backward if backward else wanted.forward) or not self.selection.wants_inside(enclosing):
            self.filter_out()
            return None
        return self._header(self.state, recompute, Level.ATEN, name, name, path, wanted, origin)

    def count_aten(self, op: str, *, backward: bool) -> int:
        """The next number of an ATen op in its direction."""
        return self.number(f"{op}:{'backward' if backward else 'forward'}", self.repetition())

    def attribution(self, op: str) -> Header:
        """The header of an API call that is not recorded itself: what happens in it belongs to it."""
        recompute = self.repetition()
        number = self.number(op, recompute)
        name, back = Level.API.call_names(op, number)
        self.selection.enter(name, back)
        return self._header(self.state, recompute, Level.API, name, back, self.module_path(), Wanted(False, True))

    def module_path(self) -> str:
        """The path of the innermost module this thread is in."""
        modules = self.state.modules
        return modules[-1] if modules else ""

    def _header(
        self,
        state: ThreadState,
        recompute: Recompute | None,
        level: Level,
        name: str,
        back: str,
        path: str,
        wanted: Wanted,
        origin: Origin | None = None,
    ) -> Header:
        if state.ordinal is None:
            self._enter_thread(state)
        repeat = 0 if recompute is None else self._repeat(name)
        if origin is not None:
            stack = origin.stack if origin.era is self.era else None
        elif level is Level.ATEN and state.call_stack is not None:
            stack = state.call_stack  # that of the API call it is made in
        else:
            stack = None if self._stacks is None else self._stacks.current(self.writer, state.outer_stack)
        parent = state.calls[-1] if state.calls else None
        ordinal = state.ordinal or 0
        call = None if origin is None else origin.call
        return Header(level, path, parent, call, stack, ordinal, repeat, self.step, name, back, wanted)

    def emit(
        self, header: Header, slots: list[Any], *, args: Any = None, kwargs: Any = None, raised: str | None = None
    ) -> None:
        """Hand over a forward call that has ended."""
        with self._lock:
            self.recorded += 1
        self._hand_over(
            (
                "call",
                header.name,
                header.level,
                header.module,
                header.parent,
                header.origin,
                header.stack,
                header.thread,
                header.repeat,
                raised,
                args,
                kwargs,
                slots,
            )
        )

    def emit_backward(self, header: Header, slots: list[Any]) -> None:
        """Hand over what a watch has seen."""
        name = header.backward_name
        repeat = self._repeat(name) - 1
        with self._lock:
            self.recorded += 1
        parent = None if header.parent is None else backward_of(header.parent)
        self._hand_over(
            (
                "call",
                name,
                header.level,
                header.module,
                parent,
                None,
                header.stack,
                header.thread,
                repeat,
                None,
                None,
                None,
                slots,
            )
        )

    def watch_backward(self, header: Header, edges: Edges, outputs: Tensors, start: int) -> None:
        """Follow the gradients of a call, if it made nodes and its backward is wanted."""
        recompute = self.repetition()
        if not header.wanted.backward or (recompute is not None and not recompute.keeps_graph):
            return
        roots = find_roots(outputs, start)
        if roots:
            _, boundary = find_boundary(roots, edges, start)
            install(Watch(header, self._takes, self.emit_backward), roots, boundary, self._in_hook)

    def mark_nodes(self, header: Header, edges: Edges, outputs: Tensors, start: int) -> None:
        """Write on each node of a call whose it is, for ATen calls made in its backward."""
        roots = find_roots(outputs, start)
        if roots:
            for node in find_boundary(roots, edges, start)[0]:
                inner: Origin | None = node.metadata.get(NODE_KEY)
                within = () if inner is None else (inner.call, *inner.within)
                node.metadata[NODE_KEY] = Origin(header.backward_name, header.module, header.stack, self.era, within)

    def _in_hook(self, watch: Watch, take: Callable[[int], bool]) -> None:
        """Tool code inside the autograd engine."""
        state = self.state
        if not self.recording or state.busy:
            self._tell_successor()
            return
        if watch.call.step != self.step:
            self.notes["backward of a call of an earlier step, not recorded"] += 1
            return
        state.busy = True
        try:
            with torch_names.no_overrides():
                task = torch_names.graph_task()
                if not watch.is_wanted(task, self.selection.wants_backward_now):
                    return
                if take(task):
                    self._expect_end(task, watch)
        except Exception as error:
            self.tool_failed(watch.call.backward_name, error)
        finally:
            state.busy = False

    def _tell_successor(self) -> None:
        """A gradient reached a call of a recording that has ended: the one that is under way now does not have it."""
        if not self.ended:
            return
        try:
            for session in [session for session in _live if session.recording]:
                session.notes["gradient of a call that was made before this recording began, not recorded"] += 1
        except RuntimeError as error:  # another thread begins a recording at this moment
            self.tool_failed("gradient after the end", error)

    def _expect_end(self, task: int, watch: Watch) -> None:
        """When the engine is done, watches that not every edge was asked for hand over what they have."""
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
        """Count a failure of the tool and remember the first."""
        with self._lock:
            self.failed += 1
        if self.first_error is None:
            self.first_error = f"{where}, step {self.step}: {type(error).__name__}: {error}"
        if self.failed >= _MOST_FAILURES and self.failed > self.recorded and self.recording:
            self.recording, self.over = False, True
            self.notes["recording stopped: most calls failed"] += 1

    def outer_stack(self, outer: OuterStack | None) -> OuterStack | None:
        """The stack of whoever calls the module tap, to be called from the frame that stays until the module has returned."""
        if self._stacks is None:
            return None
        frame = sys._getframe(1)
        return OuterStack(frame, self._stacks.walk(frame.f_back, outer))

    def filter_out(self) -> None:
        """Count a call that is not wanted."""
        with self._lock:
            self.filtered += 1

    def flush(self) -> None:
        """Hand over the calls whose statistics are still on a device; fetching them is no call of the user's."""
        busy, self.state.busy = self.state.busy, True
        try:
            with torch_names.no_overrides():
                self._late.flush()
        except Exception as error:
            self.tool_failed("statistics on the device", error)
        finally:
            self.state.busy = busy

    def discard(self, slots: list[Any]) -> None:
        """A call that began turns out not to be wanted."""
        self.filter_out()
        self.forget(slots)

    def forget(self, slots: list[Any]) -> None:
        """What looked like a call is none, or is not wanted; its tensors were sent already."""
        tokens = self.snapshots.tokens(slots)
        if tokens:
            self.writer.drop(tokens)

    def _repeat(self, name: str) -> int:
        with self._lock:
            repeat = self._repeats[name] = self._repeats.get(name, 0) + 1
        return repeat

    def _enter_thread(self, state: ThreadState) -> None:
        with self._lock:
            state.ordinal = self._threads
            self._threads += 1


def _take_nothing(tensors: Tensors) -> list[Any]:
    return []


def _stop_in_child() -> None:
    """A forked child (a DataLoader worker) inherits the taps but not the recorder: it records nothing."""
    for session in list(_live):
        session.recording = False
        session.forked = True


os.register_at_fork(after_in_child=_stop_in_child)

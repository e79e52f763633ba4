"""Installs torch modes, and removes them by identity.

A mode goes to the *bottom* of its stack: modes that the user enters and leaves are above it, and it sees what is really
executed. New threads start with empty stacks, so `Thread.run` is wrapped to install the modes there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode

from tensorprobe import torch_names
from tensorprobe.model.interrupts import let_through
from tensorprobe.taps.machinery import is_machinery
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.unshown import UnshownCalls

_MOST_EVENTS = 1000


class ModeStack:
    """The modes of one probe: one of each kind, or none. `install` and `remove` are for the calling thread."""

    def __init__(self, function: TorchFunctionMode | None, dispatch: torch_names.DispatchMode | None) -> None:
        self._function = function
        self._dispatch = dispatch
        self._patch: Patch | None = None
        self._unshown = UnshownCalls(None if function is None else self.show, None if dispatch is None else self._hide)
        self._following = False
        self._home: int | None = None
        self._due: bool | None = None
        self._compiled = None if torch_names.COMPILES_THROUGH else _CompiledCode(self)
        self.passed_compiled: Callable[[], None] = lambda: None
        """Called when the modes step aside for compiled code."""

    def install(self) -> None:
        """Put the modes below all others of this thread; inside a backward, wait for its end.

        The engine works on copies of the stacks: what is changed there is undone when it is done.
        """
        if torch_names.graph_task() != -1:
            self._due = True
            return
        self._due = None
        self._home = threading.get_ident()
        if self._compiled is not None:
            self._compiled.install()
        self._put_in()

    def remove(self) -> None:
        """Take the modes out of this thread's stacks, wherever they are."""
        if torch_names.graph_task() != -1:
            self._due = False
            return
        self._due = None
        self._take_out()

    def _put_in(self) -> None:
        self._take_out()
        if self._function is not None:
            with _lifted_function_modes():
                torch_names.push_function_mode(self._function)
        if self._dispatch is not None:
            _insert_dispatch(self._dispatch)

    def _take_out(self) -> bool:
        """Take out all modes of this thread. Return whether there were any."""
        if self._compiled is not None:
            self._compiled.forget()
        found = self._function is not None and _remove_function(self._function)
        if self._dispatch is not None:
            found = _remove_dispatch(self._dispatch) or found
        return found

    def settle(self) -> None:
        """Do what could not be done inside a backward."""
        if self._due is not None and torch_names.graph_task() == -1:
            (self.install if self._due else self.remove)()

    def run_visibly(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function from the handler of the function mode, and let the mode see what happens inside.

        A hook may have removed the modes, but torch has put this one aside and will put it back when the handler returns.
        It is taken away after that: when torch lets go of `kwargs`, which it gave to the handler, the last thing it does.
        """
        mode = self._function
        if mode is None:
            return function(*args, **(kwargs or {}))
        torch_names.push_function_mode(mode)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            try:
                top = torch_names.pop_function_mode()  # at once: a signal's handler may raise between any two calls
            except RuntimeError as error:  # there is none
                let_through(error)
                top = None
            still_on = top is mode
            if top is not None and not still_on:
                torch_names.push_function_mode(top)
                still_on = _remove_function(mode)
            if kwargs is not None and (not still_on or self._due is False):
                kwargs["tensorprobe"] = _WhenLetGo(self)

    def show(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute a call that torch hides from modes: through the function mode if this thread has one, else directly."""
        if self._function is None or not _remove_function(self._function):
            return func(*args, **kwargs)
        try:
            return self._function.__torch_function__(func, (), args, kwargs)
        finally:
            with _lifted_function_modes():
                torch_names.push_function_mode(self._function)

    def _hide(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute a call that torch cannot make under our dispatch mode. Modes of the program stay on."""
        if self._dispatch is None or not _remove_dispatch(self._dispatch):
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            _insert_dispatch(self._dispatch)

    def follow_threads(self) -> None:
        """Give threads that start from now on the modes. What other threads still have to do stays pending."""
        self._following = True
        self._unshown.install()
        if self._patch is None:
            self._patch = Patch(threading.Thread, "run", self._wrap_run)

    def unfollow_threads(self) -> None:
        """Give threads that start from now on no modes."""
        self._following = False
        self._unshown.remove()

    def leave(self) -> None:
        """Remove everything. A stack of modes belongs to its thread: another thread's is left when that thread next runs."""
        self.unfollow_threads()
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.remove()
        if self._compiled is not None:
            self._compiled.remove()
        self.remove()
        while self._dispatch is not None and _has_flags(self._dispatch):  # of threads that run no more, or not now
            _exit_dispatch(self._dispatch)
        if self._home not in (None, threading.get_ident()) and self._home == threading.main_thread().ident:
            _in_main_thread(self._take_out)

    def leave_soon(self) -> None:
        """Remove a mode that was left behind in this thread, from inside its handler: torch puts it back after that.

        The next event of the thread's profile comes after that, and is used to remove it.
        """
        if sys.getprofile() is None:
            events = iter(range(_MOST_EVENTS))

            def profile(*_: Any) -> None:
                if self._take_out() or next(events, None) is None:
                    sys.setprofile(None)

            sys.setprofile(profile)

    def _wrap_run(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        def run(thread: threading.Thread) -> Any:
            if not self._following or is_machinery(thread):
                if not patch.active:
                    patch.restore()
                return original(thread)
            self._put_in()
            try:
                return original(thread)
            finally:
                self._take_out()

        return run


class _CompiledCode:
    """Takes the modes of a thread away while compiled code runs in it, for a torch that cannot compile through them.

    A compiled function sets torch's frame callback first, and sets it back last. In between `is_compiling` is true and
    nothing would be recorded. A part that torch.compile leaves alone on request sets it back too, and is recorded.
    """

    def __init__(self, modes: ModeStack) -> None:
        self._modes = modes
        self._thread = threading.local()
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Follow the frame callback."""
        if not self._patches:
            self._patches = [Patch(*place, self._wrap) for place in torch_names.frame_callback_setters()]

    def remove(self) -> None:
        """Stop following it. A compiler that was imported in the meantime holds a wrapper, and gets the original back."""
        patches, self._patches = self._patches, []
        for patch in patches:
            patch.remove()
            for place in torch_names.frame_callback_setters():
                patch.restore(*place)

    def forget(self) -> None:
        """Do not put the modes of this thread back when its compiled code ends."""
        self._thread.aside = False

    def _wrap(self, original: Callable[[Any], Any], patch: Patch) -> Callable[[Any], Any]:
        def set_eval_frame(callback: Any) -> Any:
            prior = original(None)  # what follows must not be compiled
            if patch.active:
                self._step(aside=callable(callback))
            else:
                patch.restore()
            original(callback)
            return prior

        return torch_names.not_compiled(set_eval_frame)

    def _step(self, *, aside: bool) -> None:
        if aside == getattr(self._thread, "aside", False) or torch_names.is_being_compiled():
            return
        if not aside:
            self._modes._put_in()
        elif self._modes._take_out():
            self._thread.aside = True
            self._modes.passed_compiled()


def _in_main_thread(action: Callable[[], Any]) -> None:
    """Have the main thread call this between two of its instructions."""

    def call(_: Any) -> int:
        action()
        _pending.remove(pending)
        return 0

    pending = _PendingCall(call)
    _pending.append(pending)
    ctypes.pythonapi.Py_AddPendingCall(pending, None)


_PendingCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_pending: list[Any] = []


class _WhenLetGo:
    """Removes modes when the last reference to this object is gone."""

    def __init__(self, stack: ModeStack) -> None:
        self._stack = stack

    def __del__(self) -> None:
        self._stack.remove()


def _remove_function(function: TorchFunctionMode) -> bool:
    """Take a mode out of this thread's stack, wherever it is. Return whether it was there."""
    above = []
    found = False
    while not found and torch_names.function_modes():
        mode = torch_names.pop_function_mode()
        found = mode is function
        if not found:
            above.append(mode)
    for mode in reversed(above):
        torch_names.push_function_mode(mode)
    return found


@contextlib.contextmanager
def _lifted_function_modes() -> Iterator[None]:
    lifted = [torch_names.pop_function_mode() for _ in range(torch_names.function_modes())]
    try:
        yield
    finally:
        for mode in reversed(lifted):
            torch_names.push_function_mode(mode)


@contextlib.contextmanager
def _lifted_dispatch_modes() -> Iterator[list[Any]]:
    """Take all dispatch modes off the stack inside the `with`, and yield them, topmost first."""
    lifted = [torch_names.pop_dispatch_mode() for _ in range(torch_names.dispatch_modes())]
    try:
        yield lifted
    finally:
        for mode in reversed(lifted):
            torch_names.push_dispatch_mode(mode)


def _insert_dispatch(dispatch: torch_names.DispatchMode) -> None:
    with _lifted_dispatch_modes() as lifted:
        dispatch.__enter__()
        if lifted:
            _slip_flags_under(dispatch, lifted[-1])


def _remove_dispatch(dispatch: torch_names.DispatchMode) -> bool:
    above: list[Any] = []
    while torch_names.dispatch_modes():
        mode = torch_names.pop_dispatch_mode()
        if mode is dispatch:
            break
        above.append(mode)
    else:
        for mode in reversed(above):
            torch_names.push_dispatch_mode(mode)
        return False
    if above:
        # torch keeps "was a mode on before me?" in each mode; the one above must now answer as ours would have
        _hand_over_flags(dispatch, above[-1])
    elif _has_flags(dispatch):
        _exit_dispatch(dispatch)
    for mode in reversed(above):
        torch_names.push_dispatch_mode(mode)
    return True


def _has_flags(dispatch: torch_names.DispatchMode) -> bool:
    """Return whether torch still says, in every thread, that a mode is on because this one was entered."""
    return any(flags for name, flags in vars(dispatch).items() if name.startswith("old_") and name.endswith("_flags"))


def _exit_dispatch(dispatch: torch_names.DispatchMode) -> None:
    torch_names.push_dispatch_mode(dispatch)
    dispatch.__exit__(None, None, None)


def _slip_flags_under(arriving: Any, above: Any) -> None:
    """The reverse of handing over: the one above must answer that a mode was on before it, and ours what it would have."""
    for name, flags in vars(arriving).items():
        theirs = getattr(above, name, None) if name.startswith("old_") and name.endswith("_flags") else None
        if flags and theirs:
            # ours lets compilation be: of that flag the one above keeps its own answer
            flags[-1], theirs[-1] = theirs[-1], theirs[-1] if "compile_internals" in name else True


def _hand_over_flags(leaving: Any, above: Any) -> None:
    for name, flags in vars(leaving).items():
        if name.startswith("old_") and name.endswith("_flags") and flags:
            theirs = getattr(above, name, None)
            if theirs:
                theirs[-1] = flags.pop()

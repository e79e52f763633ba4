"""The module level: `nn.Module.__call__` wrapped once, for all modules, and restored at the end.

The other taps learn from it in which module they are. Module calls are recorded only if the level asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors, flatten_arguments, flatten_result
from tensorprobe.model import Level
from tensorprobe.model.interrupts import is_from_program
from tensorprobe.taps.backward import edges_of
from tensorprobe.taps.module_names import ModuleNames, class_name, direct_parameters
from tensorprobe.taps.patches import Patch
from tensorprobe.taps.session import OpenCall, Session
from tensorprobe.taps.step_taps import StepTap


class ModuleTap:
    """Watches calls of modules. `before` is called with each module that is called from no other one, ahead of the call.

    In a step that is not recorded, only `steps` needs it, to know where the next step begins.
    """

    def __init__(
        self,
        session: Session,
        names: ModuleNames,
        steps: StepTap,
        *,
        record: bool,
        before: Callable[[nn.Module], None],
    ) -> None:
        self._session = session
        self._names = names
        self._steps = steps
        self._record = record
        self._before_outermost = before
        self._patch: Patch | None = None
        self._looked_at: set[int] = set()

    def install(self) -> None:
        """Wrap `nn.Module.__call__`."""
        self._patch = Patch(nn.Module, "__call__", self._wrap)

    def remove(self) -> None:
        """Take the wrapper out. A program that took it out before has hidden calls of modules."""
        patch, self._patch = self._patch, None
        if patch is not None:
            if not patch.is_reached:
                self._session.blind_spots[
                    "nn.Module.__call__ was replaced by the program: later modules are not seen"
                ] += 1
            patch.remove()

    def _wrap(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        tap = self

        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch_names.is_compiling() or not tap._is_recorded(module) or tap._session.state.busy:
                if not patch.active:
                    patch.restore()
                return original(module, *args, **kwargs)
            try:
                return tap._call(original, module, args, kwargs)
            except BaseException:
                tap._session.state.busy = False
                raise

        return torch_names.not_compiled(__call__)

    def _is_recorded(self, module: nn.Module) -> bool:
        """Return whether this step is recorded; a step that is waited for may begin here."""
        session = self._session
        if not session.recording and self._steps.awaits_model and not session.ended:
            self._steps.before_model(module)
        return session.recording

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        session = self._session
        if torch_names.is_tracing():
            session.pass_by_tracing()
            return original(module, *args, **kwargs)
        state = session.state
        depth, outer = len(state.modules), state.outer_stack
        try:
            return self._call_inside(original, module, args, kwargs)
        finally:
            del state.modules[depth:]
            state.outer_stack = outer

    def _call_inside(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        session = self._session
        state = session.state
        try:
            outermost = not state.modules
            if outermost:
                self._before_outermost(module)
            path = self._path(module, outermost=outermost)
            if (training := session.training) is not None:
                if outermost:
                    training.enter(module, state)
                training.learn(module, path)
        except Exception as error:
            session.tool_failed(type(module).__name__, error)
            path = session.module_path()
        state.modules.append(path)
        state.outer_stack = session.outer_stack(state.outer_stack)
        if not self._record or not self._names.is_call(module):
            return original(module, *args, **kwargs)
        return self._recorded_call(original, module, path, args, kwargs)

    def _path(self, module: nn.Module, *, outermost: bool) -> str:
        """Return the path of a module in the model. An unknown model is added when it is first called from outside."""
        path = self._names.path(module)
        if path is None and outermost and (self._names.root is None or not self._names.as_torch):
            self._names.add(module)
            path = ""
            if self._session.training is not None:
                self._session.training.learn_model()
        if id(module) not in self._looked_at:
            self._looked_at.add(id(module))
            self._look_for_blind_spots(module)
        return path or ""

    def _look_for_blind_spots(self, module: nn.Module) -> None:
        spots = self._session.blind_spots
        if isinstance(module, torch.jit.ScriptModule):
            spots["scripted module (torch.jit): calls inside are not seen at API level"] += 1
        elif type(module).__name__ == "OptimizedModule":
            spots["compiled module (torch.compile): calls inside are not seen"] += 1
        elif isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) and not module.training:
            spots["attention in eval mode: its fused fast path is off while capture is on"] += 1

    def _recorded_call(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        session = self._session
        call = self._before(module, path, args, kwargs)
        if call is None:
            return original(module, *args, **kwargs)
        calls = session.state.calls
        depth = len(calls)
        try:
            calls.append(call.event.name)
            result = original(module, *args, **kwargs)
        except BaseException as error:
            del calls[depth:]
            self._finish(call, None, raised=error)
            raise
        del calls[depth:]
        try:
            self._finish(call, result)
        except BaseException:  # raised by the program into our code: the call was made, and belongs in the record
            if not session.is_handed_over(call.event):
                self._finish(call, result)
            raise
        return result

    def _before(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> OpenCall | None:
        session = self._session
        name = class_name(module)
        op = f"Module.{path}.{name}" if path else f"Module.{name}"
        call = None
        guard = torch_names.no_overrides()
        try:
            session.state.busy = True
            with guard:
                call = session.begin_call(op, Level.MODULE, module=path)
                if call is None:
                    return None
                inputs: Tensors = []
                call.event.args, call.event.kwargs = flatten_arguments(args, kwargs, inputs)
                inputs += direct_parameters(module)
                if call.wanted.forward and session.selection.inputs:
                    call.event.slots = session.take(inputs)
                if torch.is_grad_enabled():
                    call.roles = {} if session.training is None else session.training.gradient_roles(inputs)
                    call.edges = edges_of(inputs)
                    call.start = torch_names.sequence_number()
                return call
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            if is_from_program(error) and call is not None:
                session.cancel(op, call.event)
            session.tool_failed(op, error)
            return None
        finally:
            session.state.busy = False

    def _finish(self, call: OpenCall, result: Any, raised: BaseException | None = None) -> None:
        session = self._session
        guard = torch_names.no_overrides()
        try:
            session.state.busy = True
            with guard:
                if type(raised).__name__ == "_StopRecomputationError":
                    session.discard(call.event)
                    return
                outputs: Tensors = []
                flatten_result(result, outputs)
                session.note_result(call, result)
                if call.wanted.forward:
                    if session.selection.outputs:
                        call.event.slots += session.take(outputs)
                    call.event.raised = None if raised is None else type(raised).__name__
                    session.emit(call.event)
                if call.start >= 0 and outputs:
                    session.watch_backward(call, outputs)
        except BaseException as error:
            guard.__exit__(None, None, None)  # a tracing hook can skip it
            session.tool_failed(call.event.name, error)
        finally:
            session.state.busy = False

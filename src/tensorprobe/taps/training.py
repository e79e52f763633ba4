"""The part that a call plays in training: phase, micro-batch, and the roles of parameters, gradients and optimizer states.

Nothing here keeps a tensor or an optimizer: modules are held weakly, and tensors are known by their ids. torch refuses to swap
tensors that have weak references, and strong ones would keep memory alive. An id may be used again,
so the owner is asked each time whether the tensor is still its own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tensorprobe import torch_names
from tensorprobe.arguments import Tensors
from tensorprobe.fast import fast
from tensorprobe.model.interrupts import let_through
from tensorprobe.taps.module_names import ModuleNames, inner_module, parameters_of
from tensorprobe.taps.patches import OptimizerHooks

if TYPE_CHECKING:
    from tensorprobe.taps.session import Session
    from tensorprobe.taps.thread_state import ThreadState

OPTIMIZER = "optimizer"
GENERATE = "generate"
_MOST_FRAMES = 40
_PHASES = {
    (True, True): "train",
    (True, False): "train, no grad",
    (False, True): "eval",
    (False, False): "eval, no grad",
}
"""By `module.training` of the model, and whether gradients are on where it is called."""


def _generates(module: nn.Module) -> bool:
    """Return whether a function called `generate…` that has this module as an argument is calling it."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        code = frame.f_code
        if code.co_name.startswith("generate") and any(
            frame.f_locals.get(name) is module for name in code.co_varnames[: code.co_argcount]
        ):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


class _Owned(NamedTuple):
    """A parameter, its gradient, or a buffer, by the module that has it."""

    module: weakref.ref[nn.Module]
    key: str
    name: str
    is_gradient: bool
    is_buffer: bool
    role: str

    def of_gradient(self) -> _Owned:
        """Return the same for the gradient of the parameter."""
        return self._replace(is_gradient=True, role=f"gradient {self.name}")

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the owner still holds this tensor."""
        return (self.gradient() if self.is_gradient else self.parameter()) is tensor

    def parameter(self) -> torch.Tensor | None:
        """Return the parameter or buffer, if the module still has one."""
        module = self.module()
        if module is None:
            return None
        held = module._buffers if self.is_buffer else module._parameters
        return held[self.key] if self.key in held else None  # noqa: SIM401  # a script module has no `get`

    def gradient(self) -> torch.Tensor | None:
        """Return its gradient. Wrappers put tensors that are no leaves in place of parameters, for which torch would warn."""
        held = self.parameter()
        return held.grad if held is not None and held.is_leaf else None


class _Kept(NamedTuple):
    """A state of an optimizer, by the dictionary that has it."""

    state: dict[str, Any]
    key: str
    role: str

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the owner still holds this tensor."""
        return self.state.get(self.key) is tensor


class Training:
    """Follows the calls of the model and the steps of optimizers, from `install` to `remove`."""

    def __init__(self, session: Session, names: ModuleNames) -> None:
        self._session = session
        self._names = names
        self.microbatch: int | None = None
        """How many times the model was called since the last step of an optimizer, from 0."""
        self._parameters: dict[int, _Owned] = {}
        self._gradients: dict[int, _Owned | _Kept] = {}
        self._has_new_gradients = False
        self._optimizer: Optimizer | None = None
        """The optimizer that steps now."""
        self._states: dict[int, _Owned | _Kept] = {}
        self._states_of: tuple[int, int] | None = None
        self._hooks = OptimizerHooks(self._before_step, self._after_step)

    def install(self) -> None:
        """Watch all optimizers."""
        self.learn_model()
        self._hooks.install()

    def remove(self) -> None:
        """Stop watching."""
        self._hooks.remove()
        self._end_step()

    def begin_microbatch(self) -> None:
        """Count another call of the model before the optimizer steps."""
        self.microbatch = 0 if self.microbatch is None else self.microbatch + 1

    def enter(self, module: nn.Module, state: ThreadState) -> None:
        """Note the phase at the call of an outermost module. Modules without parameters, such as a loss, say nothing about it."""
        inner: nn.Module | None = module
        while inner is not None:
            module, inner = inner, inner_module(inner)
        is_root = module is self._names.root
        if is_root:
            self.begin_microbatch()
        if is_root or next(parameters_of(module), None) is not None:
            state.phase = _PHASES[module.training, torch.is_grad_enabled()]
            if not torch.is_grad_enabled() and _generates(module):
                state.phase = GENERATE

    def learn(self, module: nn.Module, path: str) -> None:
        """Learn the parameters and buffers of a called module: wrappers may have replaced them."""
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is not None:
                    known = self._parameters.get(id(value))
                    if known is None or not known.has(value):
                        name = f"{path}.{key}" if path else key
                        is_buffer = held is module._buffers
                        role = f"{'buffer' if is_buffer else 'parameter'} {name}"
                        self._parameters[id(value)] = _Owned(weakref.ref(module), key, name, False, is_buffer, role)

    def learn_model(self) -> None:
        """Learn the parameters of all modules that have names, in the order in which torch names them."""
        for module, path in self._names.items():
            self.learn(module, path)

    def backward_ended(self) -> None:
        """Note that parameters may have new gradients. Inside an optimizer's step, its closure has ended too."""
        self._has_new_gradients, self._states_of = True, None
        if self._optimizer is not None:
            self._session.state.phase = OPTIMIZER

    def mark(self, tensors: Tensors, slots: list[Any], *, outside: bool) -> None:
        """Write the roles of tensors into their slots. `outside`: the call is made in no module."""
        if not tensors:
            return
        others: Callable[[int], Mapping[int, _Owned | _Kept]] | None = None
        if outside:
            others = self._look_outside if tensors[0][0].startswith("input") else self._known_outside
        if fast is not None:
            fast.mark(self._parameters, others, tensors, slots)
            return
        for (_, tensor), slot in zip(tensors, slots, strict=True):
            key = id(tensor)
            known: _Owned | _Kept | None = self._parameters.get(key)
            if others is not None and (known is None or not known.has(tensor)):
                known = others(key).get(key)
            if known is not None and known.has(tensor):
                slot.role = known.role

    def gradient_roles(self, inputs: Tensors) -> dict[str, str]:
        """Return the roles of the gradients of these inputs, by slot, for those that are parameters."""
        roles = {}
        for slot, tensor in inputs:
            known = self._parameters.get(id(tensor))
            if known is not None and not known.is_buffer and known.has(tensor):
                place = slot if slot.startswith("parameters") else f"output{slot[5:]}"
                roles[place] = known.of_gradient().role
        return roles

    def _look_outside(self, key: int, *, may_grow: bool = True) -> Mapping[int, _Owned | _Kept]:
        """Return what is known of gradients, or of the states of the optimizer that steps.

        `may_grow`: a tensor that was not there at the last look may be there now.
        """
        optimizer = self._optimizer
        try:
            if optimizer is None:
                if self._has_new_gradients:
                    self._has_new_gradients = False
                    self._gradients = dict(self._roles_of_gradients())
            elif may_grow and key not in self._states:
                # An optimizer fills in its states parameter after parameter: the last one tells whether there are more.
                last = next(reversed(optimizer.state.values()), ())
                if self._states_of != (now := (len(optimizer.state), len(last))):
                    self._states_of = now
                    self._states = dict(self._roles_of(optimizer))
        except Exception as error:  # an optimizer that is built otherwise than those of torch
            let_through(error)
            self._session.notes[f"roles are not known: {type(error).__name__}: {error}"] += 1
        return self._gradients if optimizer is None else self._states

    def _known_outside(self, key: int) -> Mapping[int, _Owned | _Kept]:
        return self._look_outside(key, may_grow=False)

    def _roles_of_gradients(self) -> Iterator[tuple[int, _Owned | _Kept]]:
        for known in list(self._parameters.values()):
            if (gradient := known.gradient()) is not None:
                yield id(gradient), known.of_gradient()

    def _roles_of(self, optimizer: Optimizer) -> Iterator[tuple[int, _Owned | _Kept]]:
        """Yield what an optimizer works on. A parameter of no module has a name if the optimizer was given it."""
        for group in optimizer.param_groups:
            names = group.get("param_names") or ()
            for place, parameter in enumerate(group["params"]):
                known = self._parameters.get(id(parameter))
                if known is not None and known.has(parameter):
                    name = known.name
                    if (gradient := known.gradient()) is not None:
                        yield id(gradient), known.of_gradient()
                elif place < len(names):
                    name = str(names[place])
                else:
                    continue
                state = optimizer.state.get(parameter)
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield id(value), _Kept(state, key, f"optimizer state {key} of {name}")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._session.recording and not torch_names.is_compiling():
            self._optimizer, self._states, self._states_of = optimizer, {}, None
            self._session.state.phase = OPTIMIZER

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.microbatch = None
        self._end_step()

    def _end_step(self) -> None:
        self._optimizer, self._states, self._gradients = None, {}, {}
        self._has_new_gradients = False
        if self._session.state.phase is OPTIMIZER:
            self._session.state.phase = ""

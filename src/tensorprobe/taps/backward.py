"""True gradients of one call, from the boundary of the part of the autograd graph that the call created.

Before a call, the edges of its inputs are noted. After it, the nodes it created are found by their sequence numbers, walking
from the outputs. A hook before each outermost node sees the gradients of the outputs. A hook after each node with an edge
that leaves the set sees the gradients of the inputs. The graph is not changed, no tensor or node is kept, and no hook returns
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch.autograd.function import BackwardCFunction

from tensorprobe.arguments import Tensors
from tensorprobe.model.event import Event
from tensorprobe.torch_names import base_of, is_view, no_overrides, node_of, output_number_of, quiet, requires_grad_of

LEAF = 1 << 62
"""Nodes that accumulate into a leaf have the greatest possible sequence number."""
_CAST_DEPTH = 4

Edges = dict[Any, str]
"""A node and its number, or the id of a leaf → the slot of its gradient."""

SlotIndices = list[tuple[str, int]]
"""Slots, each with the index of its gradient among those of a node."""
Take = Callable[[Tensors], list[Any]]
Found = list[tuple[str, torch.Tensor | None]]
WholeBackward = Callable[["Watch", Tensors], bool]
"""Takes and records all gradients of a pass; False where it cannot."""


class Watch:
    """The backward of one recorded call: `about` is its event without slots.

    Hooks hold it, so it holds neither tensors nor nodes, except sums that are not complete.
    """

    __slots__ = (
        "_edges",
        "_emit",
        "_passes",
        "_record_whole",
        "_refused",
        "_several",
        "_take_inputs",
        "_take_outputs",
        "about",
        "roles",
        "step",
    )

    def __init__(
        self,
        about: Event,
        step: int,
        takes: tuple[Take, Take],
        emit: Callable[[Watch, list[Any]], None],
        record_whole: WholeBackward | None = None,
    ) -> None:
        self.about = about
        self.step = step
        self.roles: dict[str, str] = {}
        """Slot → role, of gradients that belong to parameters."""
        self._take_inputs, self._take_outputs = takes
        self._emit, self._record_whole = emit, record_whole
        self._edges = 0
        self._several: dict[str, int] | None = None
        self._passes: dict[int, _Pass] = {}
        self._refused: set[int] = set()

    def is_wanted(self, task: int, ask: Callable[[str], bool]) -> bool:
        """Return whether this pass of the engine is recorded. `ask` is called once, when the pass reaches the call."""
        if task in self._passes:
            return True
        if task in self._refused:
            return False
        if ask(self.about.name):
            return True
        self._refused.add(task)
        return False

    def expect(self, slots: list[str]) -> None:
        """Set the edges that bring gradients of inputs, by slot. A slot that comes several times gets their sum."""
        self._edges = len(slots)
        if len(set(slots)) < len(slots):
            self._several = {slot: count for slot, count in Counter(slots).items() if count > 1}

    def gradients_of_outputs(self, task: int, found: Found) -> bool:
        """Take gradients in a hook before a node. Return whether this pass of the engine is new to the watch."""
        current, new = self._pass(task)
        current.inputs += self._take_inputs([(slot, gradient) for slot, gradient in found if gradient is not None])
        return new

    def gradients_of_inputs(self, task: int, found: Found) -> bool:
        """Take gradients in a hook after a node. Return whether this pass of the engine is new to the watch."""
        current, new = self._pass(task)
        if self._several:
            found = self._add_up(current, found)
        current.outputs += self._take_outputs([(slot, gradient) for slot, gradient in found if gradient is not None])
        return new

    def keep_own(self, task: int, found: Found) -> bool:
        """Keep what this call adds to the gradient of a cast that later calls may share, until the cast passes it on."""
        current, new = self._pass(task)
        for cast, gradient in found:
            if gradient is not None:
                current.own.setdefault(cast, []).append(gradient)
        return new

    def without_others(self, task: int, found: Found, given: torch.Tensor | None, cast: str) -> Found:
        """Return the gradients behind a cast to which `given` came; where other calls share the cast, what this call added."""
        current = self._passes.get(task)
        own = current.own.pop(cast, None) if current is not None else None
        return found if own is None else [(slot, _own_share(own, gradient, given)) for slot, gradient in found]

    @property
    def is_recorded_whole(self) -> bool:
        """Whether gradients that come all at once are recorded in one go: none of them is a part of a sum."""
        return self._record_whole is not None and not self._several

    def whole(self, inputs: Found, outputs: Found) -> None:
        """Hand over a pass of the engine whose gradients have come all at once."""
        before, after = ([(slot, found) for slot, found in side if found is not None] for side in (inputs, outputs))
        if self._record_whole is None or not self._record_whole(self, before + after):
            self._emit(self, self._take_inputs(before) + self._take_outputs(after))

    def arrived(self, task: int, edges: int) -> None:
        """Count edges whose gradients have arrived. The last one ends the call."""
        current = self._passes[task]
        current.missing -= edges
        if current.missing <= 0:
            self.finish(task)

    def finish(self, task: int) -> None:
        """Hand over the gradients of this pass of the engine, once."""
        current = self._passes.pop(task, None)
        if current is not None:
            current.outputs += self._take_outputs(list(current.sums.items()))
            self._emit(self, current.inputs + current.outputs)

    def _pass(self, task: int) -> tuple[_Pass, bool]:
        current = self._passes.get(task)
        if current is not None:
            return current, False
        current = self._passes[task] = _Pass(self._edges, self._several or {})
        return current, True

    def _add_up(self, current: _Pass, found: Found) -> Found:
        """Return the complete gradients. Keep sums that more edges will add to."""
        complete: Found = []
        for slot, gradient in found:
            left = current.left.get(slot)
            if left is None:
                complete.append((slot, gradient))
                continue
            current.left[slot] = left - 1
            before = current.sums.pop(slot, None)
            if gradient is not None:
                with quiet():
                    gradient = gradient.detach()
                    before = gradient if before is None else before + gradient
            if before is not None and left > 1:
                current.sums[slot] = before
            else:
                complete.append((slot, before))
        return complete


class _Pass:
    """The gradients that one pass of the engine has brought so far."""

    __slots__ = ("inputs", "left", "missing", "outputs", "own", "sums")

    def __init__(self, missing: int, several: dict[str, int]) -> None:
        self.missing = missing
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.left = dict(several)
        self.sums: dict[str, torch.Tensor] = {}
        self.own: dict[str, list[torch.Tensor]] = {}


def _own_share(own: list[torch.Tensor], gradient: torch.Tensor | None, given: torch.Tensor | None) -> Any:
    """Return the gradient if nobody else added to it, else the sum of `own`."""
    if len(own) == 1 and own[0] is given:
        return gradient
    with quiet():
        total = own[0]
        for each in own[1:]:  # in the order of the engine
            total = total + each
        for_all = given is not None and given.shape == total.shape and torch.equal(given, total)
    return gradient if for_all else total


def edges_of(tensors: Tensors) -> Edges:
    """Return the edge of each input → the slot of its gradient. A tensor that comes twice has the total in its first slot."""
    edges: Edges = {}
    for slot, tensor in tensors:
        if requires_grad_of(tensor):
            node = node_of(tensor)
            key = id(tensor) if node is None else (node, output_number_of(tensor))
            edges.setdefault(key, slot if slot.startswith("parameters") else f"output{slot[5:]}")
    return edges


def find_roots(outputs: Tensors, start: int, *, mutates: bool = True) -> dict[Any, list[tuple[str, int]]]:
    """Return the nodes of the call that lead to its outputs, each with the slots and indices of the gradients it receives."""
    roots: dict[Any, list[tuple[str, int]]] = {}
    for slot, tensor in outputs:
        if not requires_grad_of(tensor):
            continue
        node = node_of(tensor)
        if node is not None and node._sequence_nr() >= start:
            roots.setdefault(node, []).append((f"input{slot[6:]}", output_number_of(tensor)))
        if mutates and is_view(tensor) and base_of(tensor) is not None:
            base = node_of(base_of(tensor))  # an in-place op on a view puts its history on the base
            if base is not None and base not in roots and base._sequence_nr() >= start and "CopySlices" in base.name():
                roots[base] = [(f"input{slot[6:]}.base", 0)]
    return roots


class Boundary(NamedTuple):
    """All nodes of a call, and those that pass a gradient to an input, or to the cast of a parameter that autocast keeps."""

    nodes: set[Any]
    to_inputs: dict[Any, SlotIndices]
    to_casts: dict[Any, SlotIndices]
    """In place of slots, the names of the casts."""
    casts: dict[Any, str]
    """Cast → its name. One tensor may come twice, and be cast twice."""


def find_boundary(roots: dict[Any, Any], edges: Edges, start: int) -> Boundary:
    """Return the nodes of a call, walking from its roots."""
    nodes, todo = set(roots), list(roots)
    boundary: dict[Any, SlotIndices] = {}
    to_casts: dict[Any, SlotIndices] = {}
    casts: dict[Any, str] = {}
    while todo:
        node = todo.pop()
        for place, (target, number) in enumerate(node.next_functions):
            if target is None:
                continue
            sequence = target._sequence_nr()
            if sequence > LEAF:
                slot = edges.get(id(target.variable))
            elif sequence < start or (target, number) in edges:
                slot = edges.get((target, number)) or _through_casts(target, number, edges)
            else:
                if _through_casts(target, number, edges) is not None:
                    cast = casts.setdefault(target, str(len(casts)))
                    to_casts.setdefault(node, []).append((cast, place))
                if target not in nodes:
                    nodes.add(target)
                    todo.append(target)
                continue
            if slot is not None:
                boundary.setdefault(node, []).append((slot, place))
    return Boundary(nodes, boundary, to_casts, casts)


def _through_casts(node: Any, number: int, edges: Edges) -> str | None:
    """Follow casts: autocast caches cast weights, so the cast is older than the call and its input is the call's own."""
    for _ in range(_CAST_DEPTH):
        following = [edge for edge in node.next_functions if edge[0] is not None]
        if len(following) != 1 or "ToCopy" not in node.name():
            return None
        node, number = following[0]
        slot = edges.get(id(node.variable)) if node._sequence_nr() > LEAF else edges.get((node, number))
        if slot is not None:
            return slot
    return None


Gradients = tuple[torch.Tensor | None, ...]
"""What torch passes to a hook, once or twice."""
TakeGradients = Callable[[int, tuple[Gradients, ...]], bool]
Guard = Callable[[Watch, TakeGradients, tuple[Gradients, ...]], None]


def install(watch: Watch, roots: dict[Any, SlotIndices], found: Boundary, guard: Guard) -> None:
    """Register the hooks. `guard` runs what they do as tool code, with the number of the engine's pass and their arguments.

    A node that is both root and boundary, like the only node of a simple op, needs one hook: after it, both sides are known.
    A node written in Python needs two, because it may change its inputs in place.
    """
    boundary = found.to_inputs
    watch.expect([slot for places in boundary.values() for slot, _ in places])
    if len(roots) == len(boundary) == 1 and not found.to_casts and watch.is_recorded_whole:
        ((node, places),) = roots.items()
        if _is_simple(node, boundary):
            node.register_hook(_WholeNode(watch, guard, places, boundary[node]))
            return
    for node, places in found.to_casts.items():
        node.register_hook(_BeforeCast(watch, guard, [], places))
    for node, places in roots.items():
        if _is_simple(node, boundary):
            node.register_hook(_AroundNode(watch, guard, places, boundary[node], found.casts.get(node, "")))
        else:
            node.register_prehook(_BeforeNode(watch, guard, places))
    for node, places in boundary.items():
        if node not in roots or not _is_simple(node, boundary):
            node.register_hook(_AroundNode(watch, guard, [], places, found.casts.get(node, "")))


def _is_simple(node: Any, boundary: dict[Any, SlotIndices]) -> bool:
    return node in boundary and not isinstance(node, BackwardCFunction)


class _Hook(msgspec.Struct, gc=False):
    """A hook in the graph. It takes gradients of outputs (`before` the node) and of inputs (`after` it) from these places.

    Hundreds wait for their backward at a time. The garbage collector, which counts what it tracks, does not count these.
    """

    watch: Watch
    guard: Guard
    before: SlotIndices
    after: SlotIndices = []

    def __call__(self, *gradients: Gradients) -> None:
        self.guard(self.watch, self.take, gradients)

    def take(self, task: int, gradients: tuple[Gradients, ...]) -> bool:
        """Take what this hook is for from its arguments. Return whether the engine's pass is new to the watch."""
        raise NotImplementedError


class _WholeNode(_Hook, gc=False):
    """After the only node of a call."""

    def take(self, task: int, gradients: tuple[Gradients, ...]) -> bool:
        inputs, outputs = gradients
        self.watch.whole(_pick(outputs, self.before), _pick(inputs, self.after))
        return False


class _BeforeNode(_Hook, gc=False):
    def take(self, task: int, gradients: tuple[Gradients, ...]) -> bool:
        (outputs,) = gradients
        return self.watch.gradients_of_outputs(task, _pick(outputs, self.before))


class _BeforeCast(_Hook, gc=False):
    """After a node that passes its gradient on to a cast, which may be that of several calls."""

    def take(self, task: int, gradients: tuple[Gradients, ...]) -> bool:
        inputs, _ = gradients
        return self.watch.keep_own(task, _pick(inputs, self.after))


class _AroundNode(_Hook, gc=False):
    """After a node at the boundary, which may be the first one, too."""

    cast: str = ""

    def take(self, task: int, gradients: tuple[Gradients, ...]) -> bool:
        (inputs, outputs), watch = gradients, self.watch
        new = watch.gradients_of_outputs(task, _pick(outputs, self.before)) if self.before else False
        found = _pick(inputs, self.after)
        if self.cast:
            found = watch.without_others(task, found, outputs[0], self.cast)
        new = watch.gradients_of_inputs(task, found) or new
        watch.arrived(task, len(self.after))
        return new


def _pick(gradients: tuple[torch.Tensor | None, ...], places: SlotIndices) -> Found:
    return [(slot, gradients[place]) for slot, place in places if place < len(gradients)]


def watch_gradient(tensor: torch.Tensor, action: Callable[[torch.Tensor], None]) -> Any:
    """Call `action` with every gradient that reaches a tensor. Call `remove()` on the handle that is returned.

    `action` runs as code of the tool: overrides and gradients are off, and what it returns is ignored.
    """

    def hook(gradient: torch.Tensor) -> None:
        with no_overrides(), quiet():
            action(gradient)

    return tensor.register_hook(hook)

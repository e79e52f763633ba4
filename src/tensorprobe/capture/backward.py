"""True gradients of one call, from the boundary of the part of the autograd graph that the call made.

Before a call: which edges its inputs hang on. After it: the nodes born in it, found by their sequence numbers, walked from
the outputs. A hook before each outermost node sees the gradients of the outputs; a hook after each node with an edge that
leaves the set sees the gradients of the inputs. The graph is not changed, no tensor and no node is kept, no hook returns anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorprobe.capture import private
from tensorprobe.capture.flatten import Tensors

_LEAF = 1 << 62
"""Nodes that accumulate into a leaf have the greatest sequence number there is."""
_CAST_DEPTH = 4

Edges = dict[Any, str]


class Watch:
    """The backward of one recorded call. Hooks hold it, so it holds neither tensors nor nodes, except sums under way."""

    __slots__ = ("_emit", "_expected", "_passes", "_take", "call")

    def __init__(
        self, call: Any, take: Callable[[str, torch.Tensor], Any], emit: Callable[[Any, list[Any]], None]
    ) -> None:
        self.call = call
        self._take = take
        self._emit = emit
        self._expected: dict[str, int] = {}
        self._passes: dict[int, _Pass] = {}

    def expect(self, slot: str) -> None:
        """One more edge will bring a part of this slot's gradient."""
        self._expected[slot] = self._expected.get(slot, 0) + 1

    def gradients_of_outputs(self, found: list[tuple[str, torch.Tensor]]) -> None:
        """Called from a hook before a node."""
        current = self._pass()
        for slot, gradient in found:
            current.inputs.append(self._take(slot, gradient))

    def gradients_of_inputs(self, found: list[tuple[str, torch.Tensor | None]]) -> None:
        """Called from a hook after a node. A slot that several edges feed is their sum."""
        current = self._pass()
        for slot, gradient in found:
            left = current.left[slot] = current.left.get(slot, self._expected[slot]) - 1
            if gradient is not None:
                before = current.sums.pop(slot, None)
                gradient = gradient.detach() if before is None else before + gradient.detach()
                if left:
                    current.sums[slot] = gradient
                else:
                    current.outputs.append(self._take(slot, gradient))
            elif not left and slot in current.sums:
                current.outputs.append(self._take(slot, current.sums.pop(slot)))
        current.missing -= len(found)
        if current.missing <= 0:
            self.finish(private.graph_task())

    def finish(self, task: int) -> None:
        """Hand over what came in this pass of the engine; nothing when that was done already."""
        current = self._passes.pop(task, None)
        if current is not None:
            for slot, gradient in current.sums.items():
                current.outputs.append(self._take(slot, gradient))
            self._emit(self.call, current.inputs + current.outputs)

    def _pass(self) -> _Pass:
        task = private.graph_task()
        current = self._passes.get(task)
        if current is None:
            current = self._passes[task] = _Pass(sum(self._expected.values()))
            private.at_end_of_backward(lambda: self.finish(task))
        return current


class _Pass:
    """What one run of the engine has brought so far."""

    __slots__ = ("inputs", "left", "missing", "outputs", "sums")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.left: dict[str, int] = {}
        self.sums: dict[str, torch.Tensor] = {}


def edges_of(tensors: Tensors) -> Edges:
    """Where each input hangs in the graph → the slot of its gradient. The first place of a tensor that comes twice has the total."""
    edges: Edges = {}
    for slot, tensor in tensors:
        if tensor.requires_grad:
            node = tensor.grad_fn
            key = id(tensor) if node is None else (node, tensor.output_nr)
            edges.setdefault(key, slot if slot.startswith("parameters") else f"output{slot[5:]}")
    return edges


def find_roots(outputs: Tensors, start: int) -> dict[Any, list[tuple[str, int]]]:
    """The nodes made by the call that the outputs hang on, each with the slots and places of the gradients it receives."""
    roots: dict[Any, list[tuple[str, int]]] = {}
    for slot, tensor in outputs:
        if not tensor.requires_grad:
            continue
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() >= start:
            roots.setdefault(node, []).append((f"input{slot[6:]}", tensor.output_nr))
        if tensor._is_view() and tensor._base is not None:
            base = tensor._base.grad_fn  # an in-place op on a view puts its history on the base
            if base is not None and base not in roots and base._sequence_nr() >= start and "CopySlices" in base.name():
                roots[base] = [(f"input{slot[6:]}.base", 0)]
    return roots


def find_boundary(roots: dict[Any, Any], edges: Edges, start: int) -> tuple[set[Any], dict[Any, list[tuple[int, str]]]]:
    """All nodes of the call, and those of them that hand a gradient to an input: (place in its result, slot)."""
    nodes, todo = set(roots), list(roots)
    boundary: dict[Any, list[tuple[int, str]]] = {}
    while todo:
        node = todo.pop()
        for place, (target, number) in enumerate(node.next_functions):
            if target is None:
                continue
            sequence = target._sequence_nr()
            if sequence > _LEAF:
                slot = edges.get(id(target.variable))
            elif sequence < start or (target, number) in edges:
                slot = edges.get((target, number)) or _through_casts(target, number, edges)
            else:
                if target not in nodes:
                    nodes.add(target)
                    todo.append(target)
                continue
            if slot is not None:
                boundary.setdefault(node, []).append((place, slot))
    return nodes, boundary


def _through_casts(node: Any, number: int, edges: Edges) -> str | None:
    """Autocast keeps cast weights: the cast is older than the call, and its input is the call's true one."""
    for _ in range(_CAST_DEPTH):
        following = [edge for edge in node.next_functions if edge[0] is not None]
        if len(following) != 1 or "ToCopy" not in node.name():
            return None
        node, number = following[0]
        slot = edges.get(id(node.variable)) if node._sequence_nr() > _LEAF else edges.get((node, number))
        if slot is not None:
            return slot
    return None


def install(
    watch: Watch,
    roots: dict[Any, list[tuple[str, int]]],
    boundary: dict[Any, list[tuple[int, str]]],
    guard: Callable[..., None],
) -> None:
    """Put the hooks in place. `guard(function, found)` runs the watch's methods as tool code."""
    for places in boundary.values():
        for _, slot in places:
            watch.expect(slot)
    for node, slots in roots.items():
        node.register_prehook(_before_node(watch, slots, guard))
    for node, places in boundary.items():
        node.register_hook(_after_node(watch, places, guard))


def _before_node(watch: Watch, slots: list[tuple[str, int]], guard: Callable[..., None]) -> Callable[..., None]:
    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        guard(watch, watch.gradients_of_outputs, gradients, slots)

    return hook


def _after_node(watch: Watch, places: list[tuple[int, str]], guard: Callable[..., None]) -> Callable[..., None]:
    pairs = [(slot, place) for place, slot in places]

    def hook(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        guard(watch, watch.gradients_of_inputs, gradients, pairs)

    return hook

"""Which gradient stands where in a backward entry of msprobe, and which of them the published tool has right.

An entry lists gradients without saying whose they are. Ours has one for each floating-point tensor among the arguments, in
the order of the function's parameters; that is the order of an autograd node, so it is also that of the published tool
wherever a call makes one node. The forward entry says which arguments those were.

The published tool hooks the last node that a call makes. Where a call makes several, its gradients are of something inside
the call; and it has others where a call writes in place, or gets one tensor several times. Such places are given without a
tensor, with the reason: they are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tensorprobe.model import DTYPES, Slot
from tensorprobe.ops import positional_slot

_SEVERAL_NODES = frozenset(
    """adaptive_avg_pool1d adaptive_max_pool1d alpha_dropout atleast_3d avg_pool1d bilinear broadcast_tensors cartesian_prod
    column_stack combinations cond corrcoef cosine_embedding_loss cosine_similarity cov cross_entropy ctc_loss
    cumulative_trapezoid diagflat diff dstack expand_as feature_alpha_dropout gaussian_nll_loss hinge_embedding_loss inner
    instance_norm kl_div kron l1_loss local_response_norm logdet lu_solve margin_ranking_loss matrix_norm matrix_power
    max_pool1d max_unpool1d multi_dot multi_head_attention_forward multilabel_soft_margin_loss nanmean nanquantile normalize
    outer pairwise_distance poisson_nll_loss prelu quantile repeat_interleave reshape_as smooth_l1_loss softmin softsign
    stft take_along_dim tanhshrink tensordot tensorsolve trapz triplet_margin_loss triplet_margin_with_distance_loss vander
    vecdot view_as vstack __rdiv__ __rmod__ __rpow__""".split()
)
"""Functions that make several autograd nodes, or do for some arguments: found by running torch's own samples of each."""
_STATISTICS = ("batch_norm", "instance_norm")
"""Their second and third argument are running statistics, which no node has."""
_LAST_NODE = "the published msprobe has the gradient of the last autograd node here, not that of the call"
_IN_PLACE = "the published msprobe has no gradient of the call here: it writes in place"
_SUM = "one tensor was passed several times: the published msprobe has a gradient for each place, not their sum"
_NO_BACKWARD = "the published msprobe has no gradient here: what the module returned was then changed in place"
_TOTAL = "the module was called several times: the published msprobe has the sum over its calls"


class Place(NamedTuple):
    """A tensor of a forward entry: the name of its slot, and what the entry says of it."""

    slot: str
    tensor: Mapping[str, Any]

    @property
    def needs_gradient(self) -> bool:
        """Whether its gradient is computed."""
        return _needs(self.tensor)


def is_floating(dtype: str) -> bool:
    """Return whether tensors of this dtype can have a gradient."""
    name = dtype.removeprefix("torch.")
    return name in DTYPES and DTYPES[name].kind in ("float", "complex")


def in_order(op: str, slots: Sequence[str]) -> list[str]:
    """Return the slots of floating-point arguments in the order of the function's parameters, without running statistics."""
    skipped = ("input.1", "input.2") if op.rpartition(".")[2] in _STATISTICS else ()
    placed = [(positional_slot(op, slot), slot) for slot in slots]
    return [slot for place, slot in sorted(placed, key=lambda pair: _key(pair[0])) if place not in skipped]


def _key(slot: str) -> list[tuple[int, int, str]]:
    parts = slot.split(".")[1:]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def flat(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return every leaf of a list or object of an entry with its path; a tensor is a leaf, and so is null."""
    if isinstance(tree, list):
        for place, part in enumerate(tree):
            yield from flat(part, f"{path}.{place}")
    elif isinstance(tree, dict) and "type" not in tree:
        for key, part in tree.items():
            yield from flat(part, f"{path}.{key}")
    else:
        yield path, tree


class Gradients:
    """The forward entry of a call, asked for the names of the slots of its backward entry.

    `several`: a module that was called several times, of which the published tool has one gradient for each parameter.
    """

    def __init__(self, op: str, forward: Mapping[str, Any], *, published: bool, several: bool = False) -> None:
        self._op, self._published, self._several = op, published, several
        given = [
            *flat(forward.get("input_args") or [], "input"),
            *flat(forward.get("input_kwargs") or {}, "input.kwargs"),
        ]
        tensors = {slot: leaf for slot, leaf in given if _is_tensor(leaf)}
        floating = [slot for slot, leaf in tensors.items() if is_floating(str(leaf.get("dtype")))]
        self._arguments = [Place(slot, tensors[slot]) for slot in in_order(op, floating)]
        self._results = [*flat(forward.get("output") or [], "output")]
        self._parameters = [*flat(forward.get("parameters") or {}, "parameters")]
        self._writes = _writes_in_place(op, [leaf for _, leaf in given], forward.get("input_kwargs"))

    def rename(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots of the backward entry under the names of the arguments and results they belong to."""
        made: list[Slot] = []
        outputs: dict[int, Slot] = {}
        for slot in slots:
            side, _, place = slot.name.partition(".")
            if side == "output" and place.isdecimal():
                outputs[int(place)] = slot
            elif side == "input" and place.isdecimal() and int(place) < len(self._results):
                made.append(_named(slot, f"input{self._results[int(place)][0][len('output') :]}"))
            else:
                made.append(slot)
        if not self._op.startswith("Module."):
            held = {slot.name for slot in made}
            others = [
                f"input{slot[len('output') :]}" for slot, leaf in self._results if self._published and _needs(leaf)
            ]
            made += [_without_tensor(slot, _LAST_NODE) for slot in others if slot not in held]
            return made + self._of_arguments(outputs)
        made += outputs.values()
        return self._of_published_module(made) if self._published else made

    def _of_published_module(self, slots: list[Slot]) -> list[Slot]:
        """Return the slots of a module's backward, with places for what the published tool lacks or defines otherwise."""
        shared = {_gradient(slot) for slot in self._shared()}
        made = [
            slot if slot.name not in shared else _kept(slot, slot.name.replace(".", ".place.", 1), _SUM)
            for slot in slots
        ]
        known = {slot.name for slot in made}
        lacking = {_gradient(place.slot): _NO_BACKWARD for place in self._arguments if place.needs_gradient}
        lacking |= dict.fromkeys(shared, _SUM)
        lacking |= {f"input{slot[len('output') :]}": _NO_BACKWARD for slot, leaf in self._results if _needs(leaf)}
        lacking |= {slot: _TOTAL if self._several else _NO_BACKWARD for slot, leaf in self._parameters if _needs(leaf)}
        return made + [_without_tensor(slot, reason) for slot, reason in lacking.items() if slot not in known]

    def _of_arguments(self, outputs: dict[int, Slot]) -> list[Slot]:
        reason = self._unfit(outputs) if self._published else ""
        if reason:
            kept = [_kept(slot, f"output.node.{number}", reason) for number, slot in outputs.items()]
            needed = [_gradient(place.slot) for place in self._arguments if place.needs_gradient]
            return kept + [_without_tensor(slot, reason) for slot in needed]
        order = self._arguments
        if (
            self._published and self._op == "Functional.linear"
        ):  # addmm: the bias comes first, and the weight transposed
            order = order[2:] + order[:2]
        made = []
        for number, slot in sorted(outputs.items()):
            if number >= len(order):
                made.append(slot)
                continue
            place = order[number]
            turned = self._published and self._op == "Functional.linear" and place is self._arguments[1]
            made.append(_turned(slot, _gradient(place.slot)) if turned else _named(slot, _gradient(place.slot)))
        return made

    def _unfit(self, outputs: dict[int, Slot]) -> str:
        """Return why what the published tool has are not the gradients of the arguments; empty when they are."""
        if self._writes:
            return _IN_PLACE
        if self._op.rpartition(".")[2] in _SEVERAL_NODES:
            return _LAST_NODE
        if self._shared():
            return _SUM
        shapes = [tuple(shape) if isinstance(shape := place.tensor["shape"], list) else () for place in self._arguments]
        if self._op == "Functional.linear":
            shapes = [*shapes[2:], shapes[0], shapes[1][::-1]] if len(shapes) > 1 else shapes
        fits = all(number < len(shapes) and slot.shape == shapes[number] for number, slot in outputs.items())
        return "" if fits else _LAST_NODE

    def _shared(self) -> dict[str, Any]:
        """Return the arguments that look like one tensor passed several times."""
        seen: dict[tuple[Any, ...], list[str]] = {}
        for place in self._arguments:
            about = {**place.tensor}
            about.pop("data_name", None)
            if place.needs_gradient and about.get("Max") is not None:
                seen.setdefault(tuple(map(str, about.values())), []).append(place.slot)
        return {slot: None for slots in seen.values() if len(slots) > 1 for slot in slots}


def writes_in_place(op: str) -> bool:
    """Return whether the name of an op says that it writes to its first argument."""
    name = op.rpartition(".")[2]
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _writes_in_place(op: str, given: Sequence[Any], kwargs: Any) -> bool:
    kwargs = kwargs if isinstance(kwargs, dict) else {}  # anything else is reported as damage of the forward call
    if writes_in_place(op):
        return True
    name = op.rpartition(".")[2]
    if name == "__setitem__" or "out" in kwargs:
        return True
    asked = kwargs.get("inplace") or (given[-1] if op.startswith("Functional.") and given else None)
    is_true = isinstance(asked, dict) and asked.get("type") == "bool" and asked.get("value") is True
    return is_true and name in _WITH_INPLACE


_WITH_INPLACE = frozenset(
    """alpha_dropout celu dropout dropout1d dropout2d dropout3d elu feature_alpha_dropout hardsigmoid hardswish hardtanh
    leaky_relu mish relu relu6 rrelu selu silu threshold""".split()
)


def returns_input(op: str, forward: Mapping[str, Any]) -> bool:
    """Whether the entry of a forward call says that its results are its first arguments, not written in place."""
    results, given = ([_figures(leaf) for _, leaf in flat(forward.get(key), "")] for key in ("output", "input_args"))
    is_in_place = _writes_in_place(op, given, forward.get("input_kwargs"))
    return any(map(_is_tensor, results)) and results == given[: len(results)] and not is_in_place


def _figures(leaf: Any) -> Any:
    return {key: leaf[key] for key in leaf if key != "data_name"} if _is_tensor(leaf) else leaf


def _needs(leaf: Any) -> bool:
    return _is_tensor(leaf) and leaf.get("requires_grad") is True


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, dict) and "dtype" in leaf and "shape" in leaf


def _gradient(slot: str) -> str:
    return f"output{slot[len('input') :]}"


def _named(slot: Slot, name: str) -> Slot:
    return msgspec.structs.replace(slot, name=name)


def _kept(slot: Slot, name: str, reason: str) -> Slot:
    """Return a slot that is shown and exported, and never compared."""
    return msgspec.structs.replace(slot, name=name, skipped=reason)


def _turned(slot: Slot, name: str) -> Slot:
    """Return a slot of which the transposed tensor was dumped: its statistics are the same."""
    return msgspec.structs.replace(slot, name=name, shape=slot.shape[::-1], offset=None, nbytes=0, digest=None)


def _without_tensor(name: str, reason: str) -> Slot:
    return Slot(name, "", (), device="", skipped=reason)

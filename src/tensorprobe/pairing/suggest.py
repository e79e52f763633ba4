"""Suggests a map of module names for two programs of one model.

In: the calls of one step of both runs. Out: the text of a map, as `--map` reads it. Modules with parameters or ops of their own
are paired by the digests of their parameters, then by shapes, ops and order; the modules around them by what they hold. Only
names are suggested: no verdict rests on the contents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from tensorprobe.model import Call
from tensorprobe.ops import argument_name
from tensorprobe.ops.names import canonical_op
from tensorprobe.pairing.mapping import NameMap, parse_mapping
from tensorprobe.pairing.sequence import align_sequences

MAX_MODULES = 20_000
"""How many modules of a side are looked at."""
_SHARE = 0.5
"""The share of what two modules hold that must belong together."""
_LISTED = 20


_Parameter = tuple[int, tuple[int, ...], str | None, tuple[object, object] | None]
"""When a parameter was first met, its shape and digest, its greatest and least element."""


@dataclass
class _Module:
    """What one module has of its own, without the modules inside it."""

    parameters: dict[str, _Parameter] = field(default_factory=dict)
    ops: list[Hashable] = field(default_factory=list)

    def tokens(self) -> Iterator[str | None]:
        """Yield what tells it from others, from fine to coarse. None: nothing."""
        held = sorted((shape, digest or "") for _, shape, digest, _ in self.parameters.values())
        shapes = sorted(shape for shape, _ in held)
        ends = sorted((sorted(shape), ends) for _, shape, _, ends in self.parameters.values() if ends)
        yield str(held) if held and all(digest for _, digest in held) else None
        yield str(ends) if ends and len(ends) == len(held) else None  # a matrix may be transposed
        yield str((shapes, self.ops)) if held else None
        yield str(shapes) if held else None
        yield str(sorted(sorted(shape) for shape in shapes)) if held else None
        yield str(self.ops)


def read_modules(calls: Iterable[Call]) -> dict[str, _Module]:
    """Return the modules of a step that have parameters or calls of their own, in the order in which they are first met."""
    found: dict[str, _Module] = {}
    number = count()
    for call in calls:
        if call.direction == "forward" and call.level.is_op and call.module:
            shapes = [slot.shape for slot in call.slots if slot.name.startswith("output.")]
            found.setdefault(call.module, _Module()).ops.append((canonical_op(call.op), tuple(shapes)))
        for slot in call.slots:
            kind, _, name = slot.role.partition(" ")
            digest = slot.digest if kind == "parameter" else None
            if kind not in ("parameter", "gradient"):
                if (
                    not call.module
                    or not call.level.is_op
                    or slot.side != "input"
                    or not (last := argument_name(call.op, slot.name))
                ):
                    continue
                name, digest = f"{call.module}.{last}", slot.digest
            path, _, last = name.rpartition(".")
            if len(found) < MAX_MODULES or path in found:
                known = found.setdefault(path, _Module()).parameters
                if last not in known or known[last][2] is None:
                    at = known[last][0] if last in known else next(number)
                    ends = None if digest is None or slot.summary is None else (slot.summary.max, slot.summary.min)
                    known[last] = at, slot.shape, digest, ends
    return found


def suggest_map(baseline: Iterable[Call], candidate: Iterable[Call]) -> str:
    """Return the text of a map for the modules and parameters that have another name in the candidate."""
    whole = read_modules(baseline), read_modules(candidate)
    sides = tuple({path: module for path, module in side.items() if path} for side in whole)
    own = _pair_by([{path: list(module.tokens()) for path, module in side.items()} for side in sides], {})
    pairs = own | _pair_around(own, (sides[0], sides[1]))
    parameters = _pair_parameters(pairs, whole)
    mapping = parse_mapping("\n".join(_rules(pairs | parameters)))
    names = {*own.values(), *parameters.values(), *_parameters(whole[1])}
    used = {mapping.rule_for(_named(name)) for name in names}
    lines = [f"{ours} = {theirs}" for theirs, ours in mapping.ops.items() if theirs in used]
    text = "".join(f"{line}\n" for line in lines)
    mapping = parse_mapping(text)
    right = {ours: theirs for ours, theirs in pairs.items() if mapping.rename_module(theirs) == ours}
    counts = [
        f"{sum(path in taken for path in side):,} of {len(side):,}"
        for side, taken in zip(sides, (right, right.values()), strict=True)
    ]
    ending = "with this map" if lines else "as they are named"
    head = [f"# {counts[0]} modules of the baseline and {counts[1]} of the candidate belong together {ending}."]
    for name, side, paired in zip(("baseline", "candidate"), sides, (set(right), set(right.values())), strict=True):
        alone = [path for path in side if path not in paired]
        head += [f"# only in the {name}: {path}" for path in alone[:_LISTED]]
        if len(alone) > _LISTED:
            head.append(f"# only in the {name}: {len(alone) - _LISTED:,} more")
    return "\n".join(head) + f"\n{text}"


def _pair_parameters(pairs: dict[str, str], sides: tuple[dict[str, _Module], dict[str, _Module]]) -> dict[str, str]:
    """Return the parameters that belong together although the names of their modules do not say so: baseline → candidate."""
    held = [
        {
            name: [
                str((shape, digest)) if digest else None,
                str((sorted(shape), ends)) if ends else None,  # a matrix may be transposed
                str(shape),
                str(sorted(shape)),
            ]
            for name, (_, shape, digest, ends) in _parameters(side).items()
        }
        for side in sides
    ]
    mapping = parse_mapping("\n".join(_rules(pairs)))
    named = {ours: theirs for theirs in held[1] if (ours := mapping.rename_module(theirs)) in held[0]}
    found = _pair_by(held, named)
    return {ours: theirs for ours, theirs in found.items() if ours not in named}


def _parameters(modules: dict[str, _Module]) -> dict[str, _Parameter]:
    """Return all parameters by their names, in the order in which they are first met."""
    named = {
        f"{path}.{name}".removeprefix("."): known
        for path, module in modules.items()
        for name, known in module.parameters.items()
    }
    return dict(sorted(named.items(), key=lambda each: each[1][0]))


def _pair_by(tokens: Sequence[Mapping[str, Sequence[str | None]]], pairs: dict[str, str]) -> dict[str, str]:
    """Return what belongs together on two sides: by tokens that only one of each side has, then in order, from fine to coarse."""
    pairs = dict(pairs)
    rows, columns = map(list, tokens)
    if not rows or not columns:
        return pairs
    counts = [Counter(each[0] for each in side.values()) for side in tokens]
    taken = set(pairs.values())
    by_digest = {
        each[0]: path for path, each in tokens[1].items() if each[0] and counts[1][each[0]] == 1 and path not in taken
    }
    for path, each in tokens[0].items():
        if counts[0][each[0]] == 1 and each[0] in by_digest and path not in pairs:
            pairs[path] = by_digest[each[0]]
    for fineness in range(len(tokens[0][rows[0]])):
        # What lies between two that are paired on one side lies so on the other. Where one side has more of a kind, which of
        # them is meant is not known.
        places = _gaps(rows, columns, pairs)
        keys = [
            [(gap, tokens[side][path][fineness]) for path, gap in zip(paths, places[side], strict=True)]
            for side, paths in enumerate((rows, columns))
        ]
        free = (set(rows).difference(pairs), set(columns).difference(pairs.values()))
        found = [
            [
                (key, path)
                for key, path in zip(keys[side], paths, strict=True)
                if key[1] is not None and path in free[side]
            ]
            for side, paths in enumerate((rows, columns))
        ]
        held = [Counter(key for key, _ in side) for side in found]
        queues: dict[Hashable, list[str]] = {}
        for key, path in found[1]:
            if held[0][key] == held[1][key]:
                queues.setdefault(key, []).append(path)
        for key, path in found[0]:
            if key in queues:
                pairs[path] = queues[key].pop(0)
    return pairs


def _gaps(rows: list[str], columns: list[str], pairs: dict[str, str]) -> tuple[list[int], list[int]]:
    """Return for each module of both sides how many pairs that stand in the same order on both sides come before it."""
    at = {path: number for number, path in enumerate(columns)}
    inner = np.array([at[pairs[path]] for path in rows if path in pairs], dtype=np.int64)
    chain = set(align_sequences(inner, np.sort(inner)).candidate.tolist())
    kept = {int(place) for number, place in enumerate(np.sort(inner)) if number in chain}
    ours = np.cumsum([path in pairs and at[pairs[path]] in kept for path in rows])
    theirs = np.cumsum([number in kept for number in range(len(columns))])
    return ours.tolist(), theirs.tolist()


def _pair_around(own: dict[str, str], sides: tuple[dict[str, _Module], dict[str, _Module]]) -> dict[str, str]:
    """Return the modules around those that belong together: each with the one that holds most of the same, innermost first."""
    held = [Counter(around for path in side for around in _around(path)) for side in sides]
    shared = Counter((a, b) for ours, theirs in own.items() for a in _around(ours) for b in _around(theirs))

    def weight(pair: tuple[str, str]) -> tuple[float, int]:
        share = 2 * shared[pair] / (held[0][pair[0]] + held[1][pair[1]])
        return share, sum(map(_depth, pair))

    pairs: dict[str, str] = {}
    taken = set(own.values())
    for ours, theirs in sorted(shared, key=weight, reverse=True):
        if weight((ours, theirs))[0] > _SHARE and ours not in pairs and ours not in own and theirs not in taken:
            pairs[ours] = theirs
            taken.add(theirs)
    return pairs


def _around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, from inside to outside; the model itself is the empty path."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _rules(pairs: dict[str, str]) -> Iterator[str]:
    """Yield the lines that rename each module of the candidate, the outer ones first, without those that follow from others."""
    mapping, refused = NameMap(), set()
    for ours, theirs in sorted(pairs.items(), key=lambda pair: (_depth(pair[1]), pair[1])):
        if mapping.rename_module(theirs) == ours:
            continue
        line = f"{_named(ours)} = {_named(theirs)}"
        numbers = [[part for part in path.split(".") if part.isdecimal()] for path in (ours, theirs)]
        wider = " = ".join(_named(_without_numbers(path)) for path in (ours, theirs))
        if numbers[0] and numbers[0] == numbers[1] and wider not in refused:
            held = parse_mapping(wider)
            alike = (other for other in pairs.items() if _depth(other[1]) == _depth(theirs))
            if all(held.rule_for(_named(b)) is None or held.rename_module(b) == a for a, b in alike):
                line = wider
            else:
                refused.add(wider)
        made = parse_mapping(line)
        mapping.ops.update(made.ops)
        mapping.patterns.update(made.patterns)
        yield line


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


def _named(path: str) -> str:
    return f"Module.{path}" if path else "Module"


def _without_numbers(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))

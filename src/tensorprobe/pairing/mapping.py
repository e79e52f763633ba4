"""The file for `--map`: names that the user knows to belong together.

Each line has a name of the baseline and one of the candidate, separated by `=` or spaces; `#` starts a comment. The file may
also be one JSON object, baseline → candidate. A name means one call (`Functional.silu.0.forward`), one call in both
directions (`Functional.silu.0`), an op (`Functional.silu`), or all ops with a prefix that ends at a dot (`Module.layers`).

    Functional.silu          = NPU.npu_silu
    Module.blocks              Module.layers          # the candidate's modules have another name
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import read_settings
from tensorprobe.ops.names import FAMILIES, CallName, canonical_op, family_of, parse_call_name

_EXAMPLE = "'Functional.silu = NPU.npu_silu'"


class MappedCall(NamedTuple):
    """Two calls that belong together. Without a direction, forward is paired with forward and backward with backward."""

    baseline: CallName
    candidate: CallName


@dataclass(frozen=True)
class NameMap:
    """The user's map. `ops`: an op of the candidate, or a prefix of ops, → that of the baseline."""

    calls: tuple[MappedCall, ...] = ()
    ops: dict[str, str] = field(default_factory=dict)

    def rule_for(self, op: str) -> str | None:
        """Return the longest prefix of a candidate's op that the map names; None when it names none."""
        beginning = op if self.ops else ""
        while beginning:
            if beginning in self.ops:
                return beginning
            beginning = beginning.rpartition(".")[0]
        return None

    def rename_op(self, op: str) -> str:
        """Return the baseline's name for a candidate's op."""
        rule = self.rule_for(op)
        return op if rule is None else self.ops[rule] + op[len(rule) :]

    def rename_module(self, path: str) -> str:
        """Return the baseline's name for a candidate's module path."""
        if not self.ops:
            return path
        renamed = self.rename_op(f"Module.{path}")
        return renamed[len("Module.") :] if renamed.startswith("Module.") else path


class _Line(NamedTuple):
    where: str
    baseline: str
    candidate: str


def read_map_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a map file that is a map; raise SettingsError with the line that is wrong and the reason."""
    try:
        text = read_settings(path).decode("utf-8")
    except FileNotFoundError:
        raise SettingsError(f"map file '{path}' does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read map file '{path}': {error}.") from None
    parse_mapping(text, source=str(path))
    return text


def parse_mapping(text: str, *, source: str = "map") -> NameMap:
    """Parse a map; error messages call it `source`."""
    calls: list[MappedCall] = []
    ops: dict[str, str] = {}
    seen: dict[tuple[str, str], str] = {}
    lines = _json_lines(text, source) if text.lstrip().startswith("{") else _text_lines(text, source)
    for line in lines:
        pair = MappedCall(_parse_name(line.baseline, line.where), _parse_name(line.candidate, line.where))
        _demand_same_kind(line, pair)
        for side, name in zip(("baseline", "candidate"), pair, strict=True):
            before = seen.setdefault((side, str(name)), line.where)
            if before is not line.where:
                raise SettingsError(f"{line.where}: {side} name {str(name)!r} already has a partner ({before}).")
        if pair.baseline.number:
            calls.append(pair)
        else:
            ops[canonical_op(pair.candidate.op)] = canonical_op(pair.baseline.op)
    return NameMap(tuple(calls), ops)


def _text_lines(text: str, source: str) -> Iterator[_Line]:
    for number, raw in enumerate(text.splitlines(), 1):
        names = raw.partition("#")[0].replace("=", " ").split()
        where = f"{source}, line {number}"
        if names and len(names) != 2:
            raise SettingsError(
                f"{where}: expected two names, baseline and candidate, as in {_EXAMPLE}; got {len(names)}."
            )
        if names:
            yield _Line(where, *names)


def _json_lines(text: str, source: str) -> Iterator[_Line]:
    try:
        items = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source} starts with '{{' but is not a JSON object: {error}.") from None
    for baseline, candidate in items:
        where = f"{source}, {baseline!r}"
        if not isinstance(candidate, str) or not candidate:
            raise SettingsError(f"{where}: expected a string as the candidate's name, got {candidate!r}.")
        yield _Line(where, baseline, candidate)


def _parse_name(text: str, where: str) -> CallName:
    name = parse_call_name(text)
    family = family_of(text)
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES) or f" Names start with {', '.join(FAMILIES)}."
        raise SettingsError(f"{where}: {text!r} is not the name of a call or an op.{hint}")
    return name


def _demand_same_kind(line: _Line, pair: MappedCall) -> None:
    baseline, candidate = pair
    if bool(baseline.number) != bool(candidate.number):
        one, other = (line.baseline, line.candidate) if baseline.number else (line.candidate, line.baseline)
        raise SettingsError(
            f"{line.where}: {one!r} is one call, {other!r} is every call of an op. Give both names a number, or neither."
        )
    if baseline.direction != candidate.direction:
        said = " and ".join(repr(name.direction or "no direction") for name in pair)
        raise SettingsError(f"{line.where}: expected the same direction in both names, got {said}.")

"""The file for `--map`: names that the user knows to belong together.

Each line has a name of the baseline and one of the candidate, separated by `=` or spaces; `#` starts a comment. The file may
also be one JSON object, baseline → candidate. A name means one call (`Functional.silu.0.forward`), one call in both
directions (`Functional.silu.0`), an op (`Functional.silu`), or all ops with a prefix that ends at a dot (`Module.layers`).

    Functional.silu          = NPU.npu_silu
    Module.blocks              Module.layers          # the candidate's modules have another name

An op or prefix may be a glob: `*` stands for text without a dot, `**` for any text, `?` for one character; each stands for the
same text in both names. After `re:` the candidate's name is a regular expression, and the baseline's has `\\1` for its first group.

    Module.h.*.attn          = Module.layers.*.self_attn
    Module.stage\\2.\\1        = re:Module\\.(\\w+)_(\\d+)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import read_settings
from tensorprobe.ops.names import FAMILIES, CallName, canonical_op, family_of, parse_call_name
from tensorprobe.pairing.patterns import Pattern, PatternError, expression_of, parts_of, references_of, wildcards_of

_EXAMPLE = "'Functional.silu = NPU.npu_silu'"


class MappedCall(NamedTuple):
    """Two calls that belong together. Without a direction, forward is paired with forward and backward with backward."""

    baseline: CallName
    candidate: CallName


Template = Sequence[str | int]
"""A name of the baseline in parts: text, and numbers of groups, from 1."""
MAX_PATTERNS = 1000
"""The maximum number of globs and regular expressions in a map: each is tried on each op."""


@dataclass(frozen=True)
class NameMap:
    """The user's map. `ops`: an op of the candidate, or a prefix of ops, → that of the baseline. Patterns are in it as written."""

    calls: tuple[MappedCall, ...] = ()
    ops: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, tuple[Pattern, Template]] = field(default_factory=dict, compare=False)
    """The keys of `ops` that are globs or regular expressions."""

    def rule_for(self, op: str) -> str | None:
        """Return the rule for the longest beginning of a candidate's op that the map names; None when it names none."""
        return self._apply(op)[0]

    def rename_op(self, op: str) -> str:
        """Return the baseline's name for a candidate's op."""
        return self._apply(op)[1]

    def _apply(self, op: str) -> tuple[str | None, str]:
        """Return the rule for an op, and the baseline's name. Plain names come before patterns that match as much."""
        beginning = op if self.ops else ""
        while beginning and (beginning not in self.ops or beginning in self.patterns):
            beginning = beginning.rpartition(".")[0]
        rule, end, renamed = (beginning or None), len(beginning), self.ops.get(beginning, "")
        for text, (pattern, template) in self.patterns.items():
            found = pattern.match_beginning(op)
            if found is not None and found[0] > end:
                end, groups = found
                rule, renamed = text, "".join(groups[part - 1] if isinstance(part, int) else part for part in template)
        return rule, renamed + op[end:] if rule is not None else op

    def rename_module(self, path: str) -> str:
        """Return the baseline's name for a candidate's module path."""
        if not self.ops:
            return path
        renamed = self.rename_op(f"Module.{path}" if path else "Module")
        return renamed.removeprefix("Module").removeprefix(".") if renamed.startswith("Module") else path


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
    patterns: dict[str, tuple[Pattern, Template]] = {}
    seen: dict[tuple[str, str], str] = {}
    lines = _json_lines(text, source) if text.lstrip().startswith("{") else _text_lines(text, source)
    for line in lines:
        if _is_pattern(line.baseline) or _is_pattern(line.candidate):
            patterns[line.candidate], ops[line.candidate] = _parse_pattern(line), line.baseline
            if seen.setdefault(("candidate", line.candidate), line.where) is not line.where:
                raise SettingsError(f"{line.where}: candidate name {line.candidate!r} already has a partner.")
            if len(patterns) > MAX_PATTERNS:
                raise SettingsError(f"{line.where}: a map may have {MAX_PATTERNS:,} globs and regular expressions.")
            continue
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
    return NameMap(tuple(calls), ops, patterns)


def _is_pattern(name: str) -> bool:
    """Return whether a name is a glob or a regular expression. `Functional*conv2d*0` is the spelling of an older tool."""
    return name.startswith("re:") or ("." in name and ("*" in name or "?" in name))


def _parse_pattern(line: _Line) -> tuple[Pattern, Template]:
    """Return the pattern of the candidate's name, and the baseline's with the numbers of its groups."""
    baseline, candidate = line.baseline, line.candidate
    if baseline.startswith("re:"):
        raise SettingsError(
            f"{line.where}: the regular expression is the candidate's name, on the right. The baseline's has its groups: "
            "'Module.blocks.\\1 = re:Module\\.h\\.(\\d+)'."
        )
    template: list[str | int]
    if candidate.startswith("re:"):
        expression, template = candidate[3:], list(references_of(baseline))
    else:
        ours, theirs = wildcards_of(baseline), wildcards_of(candidate)
        if ours != theirs:
            got = " and ".join(" ".join(each) or "none" for each in (ours, theirs))
            raise SettingsError(f"{line.where}: expected the same wildcards in both names, got {got}.")
        _parse_name(parts_of(candidate)[0], line.where)
        numbers = count(1)
        expression, template = expression_of(candidate), [next(numbers) if p in ours else p for p in parts_of(baseline)]
    _parse_name(str(template[0]), line.where)
    try:
        pattern = Pattern(expression)
    except PatternError as wrong:
        raise SettingsError(f"{line.where}: {candidate!r} is no pattern that can be read: {wrong}.") from None
    most = max((part for part in template if isinstance(part, int)), default=0)
    if most > pattern.groups:
        raise SettingsError(f"{line.where}: {baseline!r} has \\{most}, but {candidate!r} has {pattern.groups} groups.")
    return pattern, template


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

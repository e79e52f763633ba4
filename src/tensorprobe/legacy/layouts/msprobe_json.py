"""The JSON files of one rank of an msprobe dump, split into their entries.

In: dump.json, and stack.json and construct.json if they are there, trusted in nothing and up to some GiB long. Out: the
entries in the order of the file, still as text, with what belongs to each of them; RunDamaged with the file and the
place when a file as a whole breaks the format. NaN and Infinity, which stand bare there, become strings.
"""

from __future__ import annotations

import heapq
import os
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tensorprobe.errors import RunDamaged
from tensorprobe.numerics.summary import json_number
from tensorprobe.record.files import open_file
from tensorprobe.record.lines import JSON_ERRORS, reason_of

MAX_BYTES = 8 << 30
_LONG_LINE = 1 << 12

_BARE = (re.compile(rb"NaN"), re.compile(rb"Infinity"))
"""Two patterns, because a search for one text is ten times as fast as one for either of two."""
_STRING_OR_BARE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?Infinity|NaN)', re.DOTALL)
_GRADIENTS = re.compile(r"(Module\..+)\.parameters_grad(?:\.([0-9]{1,18}))?")

T = TypeVar("T")


class _Dump(msgspec.Struct, frozen=True):
    data: dict[str, msgspec.Raw]


_decode_large = msgspec.json.Decoder(float_hook=lambda text: json_number(float(text))).decode


class DumpEntry(NamedTuple):
    """One call: the name of its entry, and of the entry with the gradients of its parameters; either may be absent."""

    call: str | None
    gradients: str | None


class Dump(NamedTuple):
    """What the files of one rank hold. `stacks` gives the number of a call's stack, `frames` its lines as text."""

    entries: list[DumpEntry]
    data: dict[str, msgspec.Raw]
    parents: dict[str, Any]
    stacks: dict[str, int]
    frames: list[msgspec.Raw] | RunDamaged


def read_dump(root: Path, parts: tuple[str, ...]) -> Dump:
    """The files in the folder `root/parts...`. A missing stack.json or construct.json is no damage."""
    data = _read(root, (*parts, "dump.json"), _Dump, advice="Without it the dump has no meaning to us.").data
    parents: dict[str, Any] = {}
    if (root.joinpath(*parts) / "construct.json").is_file():
        advice = "Move it away to read the calls without their modules."
        parents = _read(root, (*parts, "construct.json"), dict[str, Any], advice=advice)
    stacks, frames = read_stacks(root, (*parts, "stack.json"))
    return Dump(_join_gradients(data), data, parents, stacks, frames)


def decode_entry(entry: msgspec.Raw) -> Any:
    """An entry as plain Python; any of JSON_ERRORS when it cannot be. 1e999, our own infinity, becomes a string as the bare one."""
    try:
        return msgspec.json.decode(entry)
    except msgspec.ValidationError:
        return _decode_large(entry)


def _read(root: Path, parts: tuple[str, ...], kind: type[T], *, advice: str) -> T:
    path = root.joinpath(*parts)
    try:
        with os.fdopen(open_file(root, *parts), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise RunDamaged(f"'{path}' has more than {MAX_BYTES:,} bytes; it was not read.")
            raw = file.read()
    except FileNotFoundError:
        raise RunDamaged(f"'{path}' is missing. {advice}") from None
    try:
        return _decode(raw, kind)
    except JSON_ERRORS as error:
        raise RunDamaged(f"'{path}' cannot be read: {reason_of(error)}.\n  {advice}") from None


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Strict JSON first: it is far faster than looking for what may stand bare.
        if not any(pattern.search(raw) for pattern in _BARE):
            raise
    return msgspec.json.decode(quote_bare(raw), type=kind)


def quote_bare(raw: bytes) -> bytes:
    """The text with quotes around each NaN, Infinity and -Infinity that stands outside of a string."""
    parts, done = [], 0
    for start, end in heapq.merge(*(map(re.Match.span, pattern.finditer(raw)) for pattern in _BARE)):
        begin = raw.rfind(b"\n", 0, start) + 1
        if start - begin > _LONG_LINE:
            return _STRING_OR_BARE.sub(lambda found: found[0] if found[1] is None else b'"%b"' % found[1], raw)
        # No string of JSON goes over the end of a line, so the quotes before it in the line tell where it stands.
        if raw[begin:start].replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') % 2:
            continue
        first = start - (raw[start - 1 : start] == b"-")
        parts += [raw[done:first], b'"', raw[first:end], b'"']
        done = end
    return b"".join((*parts, raw[done:]))


def read_stacks(root: Path, parts: tuple[str, ...]) -> tuple[dict[str, int], list[msgspec.Raw] | RunDamaged]:
    """Name of a call → number of its stack, and the stacks; or, in their place, what is wrong with the file."""
    if not root.joinpath(*parts).is_file():
        return {}, []
    advice = "Its calls and tensors are not concerned."
    try:
        held = _read(root, parts, dict[str, msgspec.Raw], advice=advice)
        try:
            shared = [msgspec.json.decode(text, type=tuple[list[str], msgspec.Raw]) for text in held.values()]
        except msgspec.ValidationError:  # up to 1.2.2: the lines stand under the name of each call
            return {name: number for number, name in enumerate(held)}, list(held.values())
    except RunDamaged as error:
        return {}, error
    except JSON_ERRORS as error:
        return {}, RunDamaged(f"'{root.joinpath(*parts)}' cannot be read: {reason_of(error)}.\n  {advice}")
    return {name: number for number, (names, _) in enumerate(shared) for name in names}, [lines for _, lines in shared]


def _join_gradients(data: dict[str, msgspec.Raw]) -> list[DumpEntry]:
    """The calls in the order of the file, each with the gradients of its parameters, where it can be told whose they are.

    `Module.x.Cls.parameters_grad.N` counts backward passes of the whole module, not its calls. The two are the same when
    there are as many of one as of the other; then the entry belongs to `Module.x.Cls.backward.N`, and both stand where
    the later of them stands. Otherwise it remains by itself.
    """
    numbers: dict[str, dict[int, str]] = {}
    for name in data:
        if ".parameters_grad" in name and (match := _GRADIENTS.fullmatch(name)):
            numbers.setdefault(match[1], {})[int(match[2] or 0)] = name
    partner: dict[str, str] = {}
    for module, held in numbers.items():
        calls = [f"{module}.backward.{number}" for number in range(len(held))]
        if f"{module}.backward.{len(held)}" not in data and all(call in data for call in calls):
            partner |= {call: held[number] for number, call in enumerate(calls) if number in held}
    of_gradients = {gradients: call for call, gradients in partner.items()}
    entries, waiting = [], set()
    for name in data:
        other = partner.get(name) or of_gradients.get(name)
        if other is None:
            entries.append(DumpEntry(None, name) if _GRADIENTS.fullmatch(name) else DumpEntry(name, None))
        elif other in waiting:
            entries.append(DumpEntry(name, other) if name in partner else DumpEntry(other, name))
        else:
            waiting.add(name)
    return entries

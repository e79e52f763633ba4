"""One entry of an msprobe dump as a call: its tensors as slots, the rest of its arguments as a tree.

In: what JSON says of one call. Out: a `Call`, or ValueError with the place in the entry and the fact. The entry is not
trusted: every name, number and size is checked before it is used, and depth is bounded.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tensorprobe.errors import RunDamaged
from tensorprobe.legacy.layouts.targets import TOOL
from tensorprobe.model import DTYPES, ArgumentTree, Frame, Slot, Summary
from tensorprobe.model.call import MAX_NAME
from tensorprobe.numerics.summary import json_number
from tensorprobe.record.elements import MAX_DIMENSIONS
from tensorprobe.record.files import read_whole
from tensorprobe.record.lines import JSON_ERRORS, MAX_NESTING, reason_of

_SECTIONS = (
    ("input_args", "input"),
    ("input_kwargs", "input.kwargs"),
    ("input", "input"),
    ("parameters", "parameters"),
    ("output", "output"),
)
"""Key of an entry → what the names of its slots begin with; in the order of the slots."""

_UNKNOWN = math.nan
"""One object for all: equal statistics must be equal, and a NaN is equal to itself only."""
_EMPTY = Summary(_UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, 0, 0)
_CRC32, _MD5 = re.compile("[0-9a-f]{8}"), re.compile("[0-9a-f]{32}")
_CALL_NAME = re.compile(
    r"[^\x00-\x1f\x7f]+\.(?:[0-9]{1,18}\.(?:forward|backward)|(?:forward|backward)\.[0-9]{1,18})", re.ASCII
)
_MODULE = re.compile(r"Module\.(?:(.+)\.)?[^.]+\.(?:forward|backward)\.[0-9]+")
_PLAIN = (bool, int, float, str)
_LARGEST = 2**63

NumberFile = Callable[[str], int]
"""Gives the number by which the slot's file is known."""


def demand_call_name(name: str) -> str:
    """The name; ValueError when it is not one that a call can have."""
    if len(name) > MAX_NAME:
        raise ValueError(f"its name has {len(name):,} characters; at most {MAX_NAME:,} are read")
    if _CALL_NAME.fullmatch(name) is None:
        raise ValueError("that is not the name of a call")
    return name


def find_parent(name: str, parents: dict[str, Any]) -> str | None:
    """The call in which the call was made; what stands there and is no call (`optimizer`) is left out."""
    parent = parents.get(name)
    return parent if isinstance(parent, str) and len(parent) <= MAX_NAME and _CALL_NAME.fullmatch(parent) else None


def find_module(name: str, parents: dict[str, Any]) -> str:
    """The path of the module that the call is, or of the innermost one in which it was made."""
    if name not in parents and not name.startswith("Module."):
        return ""
    above: Any = name
    for _ in range(MAX_NESTING):
        if not isinstance(above, str):
            break
        if match := _MODULE.fullmatch(above):
            return match[1] or ""
        above = parents.get(above)
    return ""


class Known:
    """Shapes and dtypes that were met and found sound before; they repeat in call after call."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._dtypes: dict[str, tuple[str, int]] = {}

    def shape(self, found: Any) -> tuple[int, ...]:
        """The shape; ValueError when it is none."""
        try:
            shape = self._shapes.get(tuple(found))
        except TypeError:
            shape = None
        if shape is None:
            shape = _demand_shape(found)
            self._shapes[shape] = shape
        return shape

    def dtype(self, found: Any) -> tuple[str, int]:
        """Our name of a dtype, and the size of an element: 0 when it is none that we know."""
        if not isinstance(found, str):
            raise ValueError(f"its dtype is {_kind(found)}, not a text")
        known = self._dtypes.get(found)
        if known is None:
            name = found.removeprefix("torch.")
            known = self._dtypes[found] = name, DTYPES[name].itemsize if name in DTYPES else 0
        return known


class EntryReader:
    """The slots and arguments of one call in the making."""

    def __init__(self, known: Known, number_file: NumberFile) -> None:
        self.slots: list[Slot] = []
        self.args: ArgumentTree = None
        self.kwargs: ArgumentTree = None
        self._known = known
        self._number_file = number_file

    def add_call(self, entry: Any, *, forward: bool) -> None:
        """What the entry of a call says."""
        if not isinstance(entry, dict):
            raise ValueError(f"an object is needed, {_kind(entry)} is there")
        for key, side in _SECTIONS:
            if key not in entry:
                continue
            tree = self._section(entry[key], side)
            if forward and key == "input_args":
                self.args = tree
            elif forward and key == "input_kwargs":
                self.kwargs = (tree["value"] if isinstance(tree, dict) else None) or None

    def add_gradients(self, entry: Any) -> None:
        """The gradients of parameters: `{"weight": [tensor]}`."""
        if not isinstance(entry, dict):
            raise ValueError(f"an object is needed, {_kind(entry)} is there")
        for key, held in entry.items():
            one = held[0] if isinstance(held, list) and len(held) == 1 else held
            self._walk(one, f"parameters.{key}", 0)

    def _section(self, value: Any, side: str) -> ArgumentTree:
        if isinstance(value, dict) and not _is_tensor(value):
            return {"type": "dict", "value": {key: self._walk(held, f"{side}.{key}", 0) for key, held in value.items()}}
        values = value if isinstance(value, list) else [value]
        return [self._walk(held, f"{side}.{number}", 0) for number, held in enumerate(values)]

    def _walk(self, value: Any, path: str, depth: int) -> ArgumentTree:
        if depth > MAX_NESTING:
            raise ValueError("nested too deeply")
        if isinstance(value, list):
            return [self._walk(held, f"{path}.{number}", depth + 1) for number, held in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if _is_tensor(value):
            self.slots.append(self._slot(value, path))
            return {"slot": path}
        kind = value.get("type")
        if isinstance(kind, str):
            return _argument(kind, value.get("value", value.get("format")))
        if not value:
            return {"type": "object", "value": ""}  # so msprobe writes whatever it does not know
        entries = {key: self._walk(held, f"{path}.{key}", depth + 1) for key, held in value.items()}
        return {"type": "dict", "value": entries}

    def _slot(self, value: dict[str, Any], path: str) -> Slot:
        try:
            (dtype, itemsize), shape = self._known.dtype(value["dtype"]), self._known.shape(value["shape"])
            file = value.get("data_name")
            has_file = isinstance(file, str) and file.endswith((".pt", ".npy"))
            digest, summary = _digest(value.get("md5")), _summary(value, shape)
            known = has_file or digest or summary
            return Slot(
                name=path,
                dtype=dtype,
                shape=shape,
                device="",
                grad=value.get("requires_grad") is True,
                summary=summary,
                digest=digest,
                offset=self._number_file(str(file)) if has_file else None,
                nbytes=math.prod(shape) * itemsize if has_file else 0,
                skipped=None if known else "msprobe recorded neither its values nor their statistics",
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _is_tensor(value: dict[str, Any]) -> bool:
    kind = value.get("type")
    return isinstance(kind, str) and kind.endswith("Tensor") and "dtype" in value and "shape" in value


def _argument(kind: str, value: Any) -> ArgumentTree:
    """An argument that is no tensor, as our own capture writes it."""
    if kind == "NoneType" or kind == "ellipsis":
        return None if kind == "NoneType" else {"type": "ellipsis", "value": None}
    if kind in ("torch.dtype", "torch.memory_format"):
        return {"type": kind, "value": str(value).removeprefix("torch.")}
    if kind in ("torch.Size", "slice", "torch.device"):
        return {"type": kind, "value": value}
    if kind.startswith("float") and isinstance(value, str):
        return {"type": "float", "value": value}  # "NaN", "Infinity", "-Infinity", which stood bare
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return {"type": "int", "value": str(value)}
    if isinstance(value, _PLAIN) and "." not in kind:
        return value
    return {"type": "object", "value": kind}


def _summary(value: dict[str, Any], shape: tuple[int, ...]) -> Summary | None:
    """The statistics of a tensor, NaN where they are not known.

    msprobe takes them over all elements, so that a NaN or an infinity shows in them, and does not count those: the
    counts are 0, or -1 for "some". It gives a number as its own norm, with its sign.
    """
    found = value.get("Max"), value.get("Min"), value.get("Mean"), value.get("Norm")
    if type(found[0]) is type(found[1]) is type(found[2]) is type(found[3]) is float:  # JSON has finite ones only
        return Summary(found[0], found[1], found[2], abs(found[3]))
    if 0 in shape:
        return _EMPTY
    greatest, least, mean, norm = map(_number, found, ("Max", "Min", "Mean", "Norm"))
    if greatest is None and least is None:
        return None
    return Summary(
        max=greatest if greatest is not None and not math.isnan(greatest) else _UNKNOWN,
        min=least if least is not None and not math.isnan(least) else _UNKNOWN,
        mean=mean if mean is not None and math.isfinite(mean) else _UNKNOWN,
        norm=abs(norm) if norm is not None and math.isfinite(norm) else _UNKNOWN,
        nan=0 if greatest == greatest and least == least else -1,
        inf=0 if all(end is None or math.isfinite(end) for end in (greatest, least)) else -1,
    )


def _number(found: Any, key: str) -> float | None:
    if found is None:
        return None
    try:
        return float(found)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its {key} is {_kind(found)}, not a number") from None


def _digest(found: Any) -> str | None:
    """The digest with its kind before it, so that it is equal only to one of the same kind.

    What msprobe calls md5 is a CRC-32, in older dumps a true MD5. It may also put an xor of all elements there, a number
    that is blind to their order: that is no digest.
    """
    if not isinstance(found, str):
        return None
    return f"crc32:{found}" if _CRC32.fullmatch(found) else f"md5:{found}" if _MD5.fullmatch(found) else None


def _demand_shape(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < _LARGEST for size in found):
        raise ValueError("its shape is not a list of sizes")
    if len(found) > MAX_DIMENSIONS:
        raise ValueError(f"it declares {len(found):,} dimensions, more than {MAX_DIMENSIONS}")
    return tuple(found)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


_LONG_LINE = 1 << 12

_BARE = (re.compile(rb"NaN"), re.compile(rb"Infinity"))
"""Two patterns, because a search for one text is ten times as fast as one for either of two."""
_STRING_OR_BARE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|(-?Infinity|NaN)', re.DOTALL)
"""A string that never ends matches up to the end of the text; otherwise each quote inside it would start a search of its own."""
_GRADIENTS = re.compile(r"(Module\..+)\.parameters_grad(?:\.([0-9]{1,18}))?")

T = TypeVar("T")


class _Dump(msgspec.Struct, frozen=True):
    data: dict[str, msgspec.Raw]
    tool: Any = ""


_decode_large = msgspec.json.Decoder(float_hook=lambda text: json_number(float(text))).decode


class DumpEntry(NamedTuple):
    """One call: the name of its entry, and of the entry with the gradients of its parameters; either may be absent.

    `alone` is the name of a call of which there are only the gradients of its parameters.
    """

    call: str | None
    gradients: str | None
    alone: str = ""


class Dump(NamedTuple):
    """What the files of one rank hold. `stacks` gives the number of a call's stack, `frames` its lines as text.

    `published`: the published msprobe wrote them, not tensorprobe.
    """

    entries: list[DumpEntry]
    data: dict[str, msgspec.Raw]
    parents: dict[str, Any]
    stacks: dict[str, int]
    frames: list[msgspec.Raw] | RunDamaged
    published: bool


def read_dump(root: Path, parts: tuple[str, ...]) -> Dump:
    """The files in the folder `root/parts...`. A missing stack.json or construct.json is no damage."""
    read = _read(root, (*parts, "dump.json"), _Dump, advice="Without it the dump has no meaning to us.")
    data = read.data
    parents: dict[str, Any] = {}
    if (root.joinpath(*parts) / "construct.json").is_file():
        advice = "Move it away to read the calls without their modules."
        parents = _read(root, (*parts, "construct.json"), dict[str, Any], advice=advice)
    stacks, frames = read_stacks(root, (*parts, "stack.json"))
    return Dump(_join_gradients(data), data, parents, stacks, frames, read.tool != TOOL)


def decode_entry(entry: msgspec.Raw) -> Any:
    """An entry as plain Python; any of JSON_ERRORS when it cannot be. 1e999, our own infinity, becomes a string as the bare one."""
    try:
        return msgspec.json.decode(entry)
    except msgspec.ValidationError:
        return _decode_large(entry)


def _read(root: Path, parts: tuple[str, ...], kind: type[T], *, advice: str) -> T:
    path = root.joinpath(*parts)
    try:
        raw = read_whole(root, *parts)
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
            match = _GRADIENTS.fullmatch(name)
            entries.append(DumpEntry(name, None) if match is None else DumpEntry(None, name, _alone(match[1], data)))
        elif other in waiting:
            entries.append(DumpEntry(name, other) if name in partner else DumpEntry(other, name))
        else:
            waiting.add(name)
    return entries


def _alone(module: str, data: Mapping[str, Any]) -> str:
    """Return the name of the module's only backward, which has no entry of its own; empty if there is not just that one."""
    backward = f"{module}.backward.0"
    is_one = f"{module}.forward.0" in data and f"{module}.forward.1" not in data and backward not in data
    return backward if is_one else ""


_FRAME = re.compile(r"File (.*), line ([0-9]{1,9}), in (.*?), ?\n ?(.*)", re.DOTALL)
_LONGEST_FRAME = 4096
_OF_TOOLS = re.compile(r"[\\/](site|dist)-packages[\\/](torch|torch_npu|msprobe)[\\/]|[\\/]api_accuracy_checker[\\/]")


def users_frames(lines: Sequence[str]) -> tuple[Frame, ...]:
    """Return the frames of the user's program, innermost first; all of them when there are only torch's and the tool's."""
    # Cut first: the pattern's time grows with the square of a hostile line's length.
    found = filter(None, (_FRAME.match(line[:_LONGEST_FRAME]) for line in lines))
    frames = [Frame(match[1], int(match[2]), match[3], match[4]) for match in found]
    return tuple([frame for frame in frames if _OF_TOOLS.search(frame.file) is None] or frames)

"""Writes a replay script: a Python file and a .safetensors file, from a call, its tensors and its limits.

The script needs torch and nothing of ours. It consists of a fixed program (`program`) and of two things that depend on the
call: `CASE`, a literal of plain data, and `call`, one expression. Whatever comes from a run is foreign: text goes in as an
ASCII literal, names of functions and dtypes come from torch's own tables, and comments are reduced to one line of ASCII.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tensorprobe.files import read_file, replace_file
from tensorprobe.model import Call
from tensorprobe.replay import program
from tensorprobe.replay.arguments import PRECISIONS, is_device_text
from tensorprobe.replay.functions import CannotReplay, find_op
from tensorprobe.replay.indices import choice_dimension, vector_dimension
from tensorprobe.replay.layout import block
from tensorprobe.replay.once import autocast_dtype, changes, stay_on_host

LIMIT_NAMES = (
    "relative_l2", "max_abs", "max_rel", "one_minus_cosine", "slope", "bias", "different", "nonfinite_different",
    "bit_identical", "ulp_max", "beyond_rounding", "over_1e2", "over_1e3", "share_over_1e3", "share_over_1e4",
)  # fmt: skip
"""The figures that a script measures."""
_HEADER = """\
# -*- coding: ascii -*-
# Replay of one call. Exit code: 1 while it fails, 0 once it passes, 2 if that cannot be decided. Needs torch only.
#     python THIS_FILE [--device DEVICE]
# Runs the call with the tensors of the .safetensors file beside this one, on the device and on a reference, and compares.
"""
_LONGEST_NAME, _LONGEST_COMMENT = 180, 400
Tensors = Mapping[str, torch.Tensor]
Limits = Mapping[str, Mapping[str, float]]
"""`output.0`, or `d input.0` for a gradient → figure → limit."""


class Sampling(NamedTuple):
    """How random results are compared, and in how many runs. `p` is dropout's."""

    kind: Literal["samples", "runs", "dropout"]
    runs: int
    p: float = 0.0


class Script(NamedTuple):
    """The two files."""

    text: str
    tensors: bytes

    def write(self, folder: Path, name: str, *, at: tuple[int, int] | None = None) -> Path:
        """Write both files and return the path of the script."""
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-")[:_LONGEST_NAME] or "call"
        path = folder / f"{safe}.py"
        if at is not None and path.exists() and place_line(*at).encode() not in read_file(path):
            path = folder / f"{safe}.step{at[0]}.rank{at[1]}.py"
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_suffix(".safetensors"), self.tensors)
        replace_file(path, self.text.encode("ascii"))
        return path


def place_line(step: int, rank: int) -> str:
    """Return a comment with the step and rank of a call."""
    return f"Step {step}, rank {rank}."


class Results(NamedTuple):
    """Known results of a call, and its limits."""

    limits: Limits
    held: Tensors = {}  # never changed
    """Saved beside the inputs: `device.output.0`, `device.gradient.output.0`, `reference.output.0`."""
    changed: Mapping[str, str] = {}
    """Outputs that are changed arguments → the argument."""
    sampling: Sampling | None = None
    """Set for random ops; the limits then only name the slots."""


def make_script(
    call: Call,
    inputs: Tensors,
    gradients: Tensors,
    results: Results,
    *,
    device: str,
    precision: str = "double",
    about: Iterable[str] = (),
    imports: Iterable[str] = (),
) -> Script:
    """Return the script that runs the call alone. Raises CannotReplay if it cannot be written.

    `gradients` are those of the outputs, by the outputs' slots. `about` are lines of comment,
    `imports` modules that the op needs.
    """
    function = find_op(call.op).function
    held = {**inputs, **{f"gradient.{name}": tensor for name, tensor in gradients.items()}}
    autocast = autocast_dtype(call)
    outputs = [name for name in results.limits if not name.startswith("d ")]
    kinds = {name.removeprefix("device."): tensor.dtype for name, tensor in results.held.items()}
    case = {
        "device": device,
        "imports": [*(["torch_npu"] if call.op.startswith("NPU.") else []), *imports],
        "wide": {_short(one): _short(other) for one, other in PRECISIONS[precision].items()},
        "grads": [slot.name for slot in call.slots if slot.grad and slot.name in inputs],
        "on_host": sorted(stay_on_host(call) & set(inputs)),
        "mutates": changes(call, function)[0],
        "changed": dict(results.changed),
        "autocast": None if autocast is None else _short(autocast),
        "choices": {
            name: found[0]
            for name in outputs
            if kinds.get(name) is torch.int64 and (found := choice_dimension(call, name)) is not None
        },
        "vectors": {name: dim for name in outputs if (dim := vector_dimension(call.op, name)) is not None},
        "layouts": {
            name: (tuple(tensor.shape), tensor.stride())
            for name, tensor in held.items()
            if not tensor.is_contiguous() or tensor.is_complex()
        },
        "complex": [name for name, tensor in held.items() if tensor.is_complex()],
        "sampling": None if results.sampling is None else results.sampling._asdict(),
        "limits": {name: dict(each) for name, each in results.limits.items()},
    }
    return Script(_text(case, call_source(call), about), pack_tensors({**held, **results.held}))


def _text(case: Mapping[str, Any], source: str, about: Iterable[str]) -> str:
    comments = "".join(f"# {_comment(line)}\n" for line in about)
    entries = "".join(f"    {key!a}: {_literal(value)},\n" for key, value in case.items())
    fixed = Path(program.__file__).read_text(encoding="utf-8")
    return (
        f"{_HEADER}#\n{comments}\n"
        f"CASE = {{\n{entries}}}\n\n\ndef call(t, device, dtype):\n    return {source}\n\n\n"
        f"{fixed[fixed.index('import argparse') :]}\n\n"
        'if __name__ == "__main__":\n    raise SystemExit(main(CASE, call, __file__))\n'
    )


def _comment(text: str) -> str:
    """Return foreign text as one line of ASCII."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain.encode("ascii", "backslashreplace").decode()[:_LONGEST_COMMENT]


def _literal(value: Any) -> str:
    """Return plain data as Python source in ASCII."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{str(key)!a}: {_literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_literal(entry) for entry in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, str)):
        return ascii(value)
    raise CannotReplay(f"an argument is of type {type(value).__name__}, which cannot be recorded")


def call_source(call: Call) -> str:
    """Return `torch.nn.functional.softmax(t['input.0'], dim=-1)`; `t` are tensors by slot, `dtype` and `device` adapt to the run."""
    kwargs = call.kwargs or {}
    parts = ["device" if is_device_text(call, tree) else _source(tree) for tree in call.args or []]
    named = {key: "device" if is_device_text(call, tree, key) else _source(tree) for key, tree in kwargs.items()}
    plain = {key for key in named if key.isascii() and key.isidentifier() and not keyword.iskeyword(key)}
    parts += [f"{key}={source}" for key, source in named.items() if key in plain]
    odd = ", ".join(f"{key!a}: {source}" for key, source in named.items() if key not in plain)
    return f"{find_op(call.op).path}({', '.join([*parts, f'**{{{odd}}}'] if odd else parts)})"


def _source(tree: Any) -> str:
    if isinstance(tree, list):
        return "[" + ", ".join(_source(part) for part in tree) + "]"
    if not isinstance(tree, dict):
        return _literal(tree)
    if "slot" in tree:
        return f"t[{str(tree['slot'])!a}]"
    kind: Any = tree.get("type")
    value: Any = tree.get("value")
    if kind == "torch.dtype":
        return f"dtype({_name_of(value, torch.dtype)})"
    if kind in ("torch.layout", "torch.memory_format"):
        return _name_of(value, (torch.layout, torch.memory_format))
    if kind == "torch.device":
        return "device"
    if kind in ("float", "int"):
        return f"{kind}({str(value)!a})"
    if kind == "ellipsis":
        return "..."
    if kind == "dict" and isinstance(value, dict):
        return "{" + ", ".join(f"{key!a}: {_source(part)}" for key, part in value.items()) + "}"
    if kind not in ("tuple", "torch.Size", "slice", "complex") or not isinstance(value, list):
        raise CannotReplay(f"an argument is an object that cannot be recorded ({_comment(str(value))})")
    return _sequence(kind, value)


def _sequence(kind: str, value: Sequence[Any]) -> str:
    if kind == "complex":
        return f"complex({', '.join(f'float({str(part)!a})' for part in value)})"
    inside = ", ".join(_source(part) for part in value)
    if kind == "tuple":
        return f"({inside}{',' if len(value) == 1 else ''})"
    return f"slice({inside})" if kind == "slice" else f"torch.Size([{inside}])"


def _name_of(value: Any, kind: Any) -> str:
    short = str(value).removeprefix("torch.")
    if not short.isascii() or not short.isidentifier() or not isinstance(getattr(torch, short, None), kind):
        raise CannotReplay(f"this torch has no {_comment(short)!r}")
    return f"torch.{short}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CODES = {name: code for code, name in program.DTYPES.items()}


def pack_tensors(tensors: Tensors) -> bytes:
    """Return a .safetensors file. Strided tensors are stored as the memory they span, complex ones as their parts."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    stored = {name: storable(tensor) for name, tensor in tensors.items()}
    for name, tensor in sorted(stored.items(), key=lambda one: (-one[1].dtype.itemsize, one[0])):  # keeps them aligned
        code = _CODES.get(_short(tensor.dtype))
        if code is None:
            raise CannotReplay(f"{name} is {_short(tensor.dtype)}, which a .safetensors file cannot hold")
        parts.append(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [end, end + len(parts[-1])]}
        end += len(parts[-1])
    packed = json.dumps(header, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    return b"".join((len(packed).to_bytes(8, "little"), packed, *parts))


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU; the memory it spans if it is not contiguous; complex numbers as real and imaginary parts."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = tensor if tensor.is_contiguous() and not tensor.is_complex() else block(tensor)
    return torch.view_as_real(flat).flatten().clone() if flat.is_complex() else flat.clone()

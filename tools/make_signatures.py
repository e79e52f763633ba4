"""Writes src/tensorprobe/ops/signatures.txt: names and defaults of the arguments of torch's functions, as this torch has them.

python tools/make_signatures.py
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

TARGET = Path(__file__).resolve().parents[1] / "src" / "tensorprobe" / "ops" / "signatures.txt"
Signature = tuple[list[str], dict[str, Any]]
"""The names of the arguments by position, and the defaults by name."""


def _is_plain(value: Any) -> bool:
    many = isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value)
    return many or isinstance(value, type(None) | bool | int | float | str)


def _schemas() -> dict[str, list[Any]]:
    found = defaultdict(list)
    for schema in torch._C._jit_get_all_schemas():
        takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
        if schema.name.startswith("aten::") and takes_tensor and not schema.overload_name.endswith("out"):
            found[schema.name.removeprefix("aten::")].append(schema)
    return found


def _merge(schemas: list[Any]) -> Signature:
    """Return what all overloads have in common; a position that has several names has none."""
    positions: list[str] = []
    defaults: dict[str, Any] = {}
    unclear = set()
    for schema in schemas:
        for at, name in enumerate(each.name for each in schema.arguments if not each.kwarg_only):
            if at == len(positions):
                positions.append(name)
            elif positions[at] != name:
                positions[at] = "?"
        for each in schema.arguments:
            plain = each.has_default_value() and _is_plain(each.default_value)
            if plain and defaults.setdefault(each.name, each.default_value) != each.default_value:
                unclear.add(each.name)
    return positions, {name: value for name, value in defaults.items() if name not in unclear}


def _of_python(function: Any) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    plain = {each.name: each.default for each in parameters if each.default is not each.empty}
    return [each.name for each in named], {name: value for name, value in plain.items() if _is_plain(value)}


def _signatures() -> dict[str, Signature]:
    schemas, found = _schemas(), {}
    for name in sorted(set(dir(functional))):
        function = getattr(functional, name)
        if name.startswith("_") or not callable(function) or inspect.isclass(function):
            continue
        try:
            found[f"Functional.{name}"] = _of_python(function)
        except ValueError:  # it is written in C++
            if name in schemas:
                found[f"Functional.{name}"] = _merge(schemas[name])
    homes = (torch, torch.Tensor, torch.special, torch.linalg, torch.fft)
    for name in sorted({name for home in homes for name in dir(home) if name in schemas and not name.startswith("_")}):
        if (merged := _merge(schemas[name]))[1]:
            found[name] = merged
    return found


def _line(name: str, signature: Signature) -> str:
    positions, defaults = signature
    words = {each: f"{each}={value!r}".replace(" ", "") for each, value in defaults.items()}
    rest = [word for each, word in words.items() if each not in positions]
    return " ".join([name, *(words.get(each, each) for each in positions), *(["*"] if rest else []), *rest])


if __name__ == "__main__":
    TARGET.write_text("".join(f"{_line(*each)}\n" for each in _signatures().items()), encoding="utf-8")

"""Dumps of api_accuracy_checker made by hand, and read with json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def tensor(dtype: str = "torch.float32", shape: tuple[int, ...] = (2, 3), **more: Any) -> dict[str, Any]:
    """The entry of a tensor by its statistics."""
    return {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": list(shape),
        "Max": 1.5,
        "Min": -0.5,
        "requires_grad": False,
        **more,
    }


def write_dump(
    folder: Path,
    forward: Any,
    backward: Any = None,
    stack: Any = None,
    *,
    tag: str = "7",
) -> Path:
    """Write what is given; the path of the forward file comes back. Text is written as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, content in (("forward", forward), ("backward", backward), ("stack", stack)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{kind}_info_{tag}.json").write_text(text, encoding="utf-8")
    return folder / f"forward_info_{tag}.json"


def save(folder: Path, name: str, value: Any, *, direction: str = "forward") -> str:
    """Save a tensor as the older tool does; the path as its JSON has it."""
    path = folder / f"{direction}_real_data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return str(path)


def read_strictly(path: Path) -> dict[str, Any]:
    """Standard JSON, or an error: bare NaN and Infinity are none, nor is a key that stands there twice."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{path} holds a bare {constant}")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    held: dict[str, Any] = json.loads(path.read_text("utf-8"), parse_constant=refuse, object_pairs_hook=distinct)
    return held

"""Dumps of msprobe written by hand, with json and torch.save alone, in the form that msprobe 26.2 was seen to write.

`conv_net` is a dump that the tool itself made of a convolution, a mask, a maximum and their backward at level mix: of
each entry of dump.json the text that is written here was the tool's own, byte for byte. Stacks are shortened.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensorprobe.record import StoredCall, open_run

Entry = dict[str, Any]
"""As in dump.json, with true tensors in place of their descriptions and plain Python in place of scalars."""

_PATHS = {"input_args": "input", "input_kwargs": "input"}
TORCH = "/usr/lib/python3/dist-packages/torch/nn/modules"


def write_dump(
    folder: Path,
    data: dict[str, Entry],
    *,
    task: str = "tensor",
    level: str = "mix",
    md5: bool = False,
    form: str = ".pt",
    indent: int | None = 1,
    stacks: Any = None,
    construct: Any = None,
) -> Path:
    """One rank folder. task: tensor (with values) or statistics."""
    values = folder / "dump_tensor_data"
    (values if task == "tensor" else folder).mkdir(parents=True, exist_ok=True)
    writer = _Writer(values if task == "tensor" else None, md5, form)
    head = {"task": task, "level": level, "framework": "pytorch", "dump_data_dir": str(values)}
    entries = {name: writer.entry(name, entry) for name, entry in data.items()}
    _write(folder / "dump.json", {**head, "data": entries}, indent)
    if stacks is not None:
        _write(folder / "stack.json", stacks, indent)
    if construct is not None:
        _write(folder / "construct.json", construct, indent)
    return folder


class _Writer:
    def __init__(self, values: Path | None, md5: bool, form: str) -> None:
        self._values, self._md5, self._form = values, md5, form

    def entry(self, name: str, entry: Entry) -> Entry:
        return {key: self._convert(value, f"{name}.{_PATHS.get(key, key)}") for key, value in entry.items()}

    def _convert(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if value is None or (isinstance(value, dict) and "type" in value):
            return value
        if isinstance(value, dict):
            return {key: self._convert(held, f"{path}.{key}") for key, held in value.items()}
        if isinstance(value, (list, tuple)):
            # The gradients of a parameter are a list of one, whose file has no number.
            single = ".parameters_grad." in path
            return [self._convert(held, path if single else f"{path}.{at}") for at, held in enumerate(value)]
        return {"type": type(value).__name__, "value": value}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Entry:
        kept = tensor.detach()
        keys = ("Max", "Min", "Mean", "Norm")
        entry = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        entry |= dict(zip(keys, statistics(kept), strict=True)) | {"requires_grad": tensor.requires_grad}
        if self._values is not None:
            entry["data_name"] = f"{path}{self._form}"
            if self._form == ".npy":
                np.save(self._values / entry["data_name"], kept.numpy())
            else:
                torch.save(kept.clone().contiguous(), self._values / entry["data_name"])
        if self._md5:
            entry["md5"] = f"{zlib.crc32(kept.contiguous().numpy().tobytes()):08x}"
        return entry


def statistics(tensor: torch.Tensor) -> list[Any]:
    """Max, Min, Mean, Norm over all elements; a single number is each of them; no mean and norm of integers and bools."""
    if not tensor.numel():
        return [None] * 4
    if tensor.dtype == torch.bool:
        return [bool(tensor.any()), bool(tensor.all()), None, None]
    if not tensor.shape:
        return [tensor.item()] * 4
    ends = [tensor.max().item(), tensor.min().item()]
    return ends + ([tensor.mean().item(), tensor.norm().item()] if tensor.is_floating_point() else [None, None])


def _write(path: Path, value: Any, indent: int | None) -> None:
    path.write_text(json.dumps(value, indent=indent), encoding="utf-8")


def conv_net(*, weight: float = 2.0, error: float = 0.0) -> tuple[dict[str, Entry], Any, Any]:
    """The entries, stacks and parents of `max(masked_fill(conv(x)))`. `error` is added to what the convolution gives back."""
    x = torch.arange(4.0).reshape(1, 1, 2, 2)
    w, b = (torch.full(shape, value, requires_grad=True) for shape, value in (((1, 1, 1, 1), weight), ((1,), 5.0)))
    y = torch.nn.functional.conv2d(x, w, b) + error
    above = y > 9
    masked = y.masked_fill(above, -math.inf)
    greatest, index = masked.max(dim=1, keepdim=True)
    ones = torch.ones(1, 1, 2, 2)
    into_conv = ones.masked_fill(above, 0.0)
    gradients = {"weight": [(into_conv * x).sum().reshape(1, 1, 1, 1)], "bias": [into_conv.sum().reshape(1)]}
    data: dict[str, Entry] = {
        "Functional.conv2d.0.forward": {
            "input_args": [x, w, b, (1, 1), (0, 0), (1, 1), 1],
            "input_kwargs": {},
            "output": [y],
        },
        "Module.conv.Conv2d.forward.0": {
            "input_args": [x],
            "input_kwargs": {},
            "output": [y],
            "parameters": {"weight": w, "bias": b},
        },
        "Tensor.__gt__.0.forward": {"input_args": [y, 9], "input_kwargs": {}, "output": [above]},
        "Tensor.masked_fill.0.forward": {
            "input_args": [y, above, -math.inf],
            "input_kwargs": {},
            "output": [masked],
        },
        "Torch.max.0.forward": {
            "input_args": [masked],
            "input_kwargs": {"dim": 1, "keepdim": True},
            "output": [greatest, index],
        },
        "Torch.max.0.backward": {"input": [ones], "output": [ones]},
        "Tensor.masked_fill.0.backward": {"input": [ones], "output": [into_conv]},
        "Module.conv.Conv2d.backward.0": {"input": [into_conv], "output": []},
        "Functional.conv2d.0.backward": {
            "input": [into_conv],
            "output": [None, gradients["weight"][0], gradients["bias"][0]],
        },
        "Module.conv.Conv2d.parameters_grad.0": gradients,
    }
    return (
        data,
        STACKS,
        {**dict.fromkeys(list(data)[:-1]), "Functional.conv2d.0.forward": "Module.conv.Conv2d.forward.0"},
    )


_CALLER = "File /home/you/net.py, line 17, in <module>, \n y, i = net(x)"
STACKS: Any = {
    "0": [
        ["Module.conv.Conv2d.forward.0"],
        [
            f"File {TORCH}/module.py, line 1884, in _call_impl, \n return inner()",
            "File /home/you/net.py, line 9, in forward, \n x = self.conv(x)",
            _CALLER,
        ],
    ],
    "1": [
        ["Functional.conv2d.0.forward"],
        [
            f"File {TORCH}/conv.py, line 560, in _conv_forward, \n return F.conv2d(",
            "File /home/you/net.py, line 9, in forward, \n x = self.conv(x)",
            _CALLER,
        ],
    ],
    "2": [
        ["Tensor.__gt__.0.forward", "Tensor.masked_fill.0.forward"],
        ['File /home/you/net.py, line 10, in forward, \n x = x.masked_fill(x > 9, float("-inf"))', _CALLER],
    ],
    "3": [
        ["Torch.max.0.forward"],
        ["File /home/you/net.py, line 11, in forward, \n return torch.max(x, dim=1, keepdim=True)", _CALLER],
    ],
}


def write_conv_net(root: Path, *, steps: int = 1, task: str = "tensor", md5: bool = False, **change: Any) -> Path:
    """A whole dump: `step{S}/proc77`, as the tool writes it where torch.distributed was not initialised."""
    for step in range(steps):
        data, stacks, construct = conv_net(**change)
        write_dump(root / f"step{step}/proc77", data, task=task, md5=md5, stacks=stacks, construct=construct)
    return root


def described(**changes: Any) -> dict[str, Any]:
    """A tensor as dump.json describes it."""
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 2.0, "Min": 1.0, **changes}


def write_one(root: Path, **entry: Any) -> Path:
    """A dump of the one call Torch.mm.0.forward."""
    return write_dump(root / "step0/rank0", {"Torch.mm.0.forward": entry})


def read_one(root: Path, **entry: Any) -> StoredCall:
    """That call, as our reader gives it."""
    write_one(root, **entry)
    return open_run(root).call("Torch.mm.0.forward")

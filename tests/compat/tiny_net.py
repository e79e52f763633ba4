"""The dump of a net of three calls as a dict, and the table that comes of two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders.ptdbg import Line, stack, tensor, write_rank

Tensors = dict[str, Any]
"""Name of a line → its array, in the order of the pkl."""
Rows = list[dict[str, str]]
Stacks = Mapping[str, Sequence[Sequence[str]]]
VERDICT, MESSAGE = "Accuracy Reached or Not", "Err_message"
X = np.linspace(-1, 2, 24, dtype=np.float32).reshape(4, 6)
STACK = [["net.py", "12", "forward", "y = F.relu(x)"], ["train.py", "88", "main", "loss = net(x)"]]
CONV, RELU, SUM = "Functional_conv2d_0_forward", "Functional_relu_0_forward", "Tensor_sum_0_forward"
RELU_BACKWARD = "Functional_relu_0_backward"


def tensors() -> Tensors:
    return {
        f"{CONV}_input.0": X,
        f"{CONV}_input.1": X * 2,
        f"{CONV}_output": X + 1,
        f"{RELU}_input.0": X + 1,
        f"{RELU}_output": np.maximum(X + 1, 0),
        f"{SUM}_input.0": X,
        f"{SUM}_output": np.float32(X.sum()),
        f"{RELU_BACKWARD}_input.0": X * 3,
        f"{RELU_BACKWARD}_output.0": X * 4,
    }


def lines_of(held: Tensors, stacks: Stacks | None = None) -> list[Line]:
    """The lines of a pkl; the stack of a call (prefix → frames) stands behind its tensors."""
    lines = [tensor(name, value) for name, value in held.items()]
    for call, frames in (stacks or {}).items():
        last = max(at for at, line in enumerate(lines) if line.fields[0].startswith(f"{call}_"))  # type: ignore[union-attr]
        lines.insert(last + 1, stack(call, *frames))
    return lines


def write(pkl: Path, held: Tensors, stacks: Stacks | None = None) -> Path:
    """One pkl and its values."""
    return write_rank(pkl.parent, lines_of(held, stacks), name=pkl.stem)


def dumps(npu: Tensors, bench: Tensors, prefix: str = "", stacks: Stacks | None = None) -> dict[str, Any]:
    """Both dumps on disk, as the dict that `compare` takes. The working folder is the test's own."""
    param: dict[str, Any] = {}
    for side, held in (("npu", npu), ("bench", bench)):
        pkl = write(Path(side, f"{prefix}{side}_dump.pkl"), held, stacks)
        param |= {f"{side}_pkl_path": str(pkl), f"{side}_dump_data_dir": str(pkl.with_suffix(""))}
    return param


def failing(rows: Rows) -> list[str]:
    """The names of the rows that are `No`."""
    return [row["NPU Name"] for row in rows if row[VERDICT] == "No"]

"""Runs of several ranks written by hand: a product on each rank, a sum over all ranks, and what each makes of the sum.

A fault on one rank changes its product; the sum carries it to every other rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

from tests.builders.runs import Blob, slot, write_calls, write_manifest, write_rank

SIZE = 16
FILES = ("result.parquet", "summary.json", "advisor.txt", "evidence.json", "report.html")


def write_ranks(
    root: Path,
    *,
    ranks: Sequence[int] = (0, 1, 2),
    steps: Sequence[int] = (0, 1),
    fault: tuple[int, int] | None = None,
    factor: float = 1.25,
    rename: str = "",
    **manifest: Any,
) -> Path:
    """A run; `fault` is the step and rank whose product is `factor` times too large. Returns its folder."""
    write_manifest(root, world_size=len(ranks), **manifest)
    for step in steps:
        generator = numpy.random.default_rng(step)
        inputs = {rank: generator.standard_normal((SIZE, SIZE)).astype("float32") for rank in sorted(ranks)}
        products = {rank: value @ value.T for rank, value in inputs.items()}
        if fault is not None and fault[0] == step:
            products[fault[1]] *= numpy.float32(factor)
        total = sum(products.values())
        for rank in ranks:
            _write_step(root, step, rank, [inputs[rank], products[rank], total, total * numpy.float32(0.5)], rename)
    for rank in ranks:
        write_rank(root, rank, steps=list(steps), coverage={"seen": 3 * len(steps), "recorded": 3 * len(steps)})
    return root


def _write_step(root: Path, step: int, rank: int, values: list[Any], rename: str) -> None:
    blob = Blob()

    def tensor(name: str, value: Any) -> dict[str, Any]:
        return slot(name, "float32", [SIZE, SIZE], numpy.ascontiguousarray(value, dtype="float32").tobytes(), blob)

    start, product, total, half = values
    calls = [
        {
            "name": f"{rename or 'Torch.matmul'}.0.forward",
            "stack": 0,
            "slots": [tensor("input.0", start), tensor("input.1", start.T), tensor("output.0", product)],
        },
        {
            "name": "Distributed.all_reduce.0.forward",
            "slots": [tensor("input.0", product), tensor("output.changed.0", total)],
        },
        {"name": "Tensor.mul.0.forward", "slots": [tensor("input.0", total), tensor("output.0", half)]},
    ]
    folder = write_calls(root, calls, step=step, rank=rank)
    (folder / "tensors.bin").write_bytes(blob.content)
    stack = {"id": 0, "frames": [["train.py", 12, "forward", "y = x @ x.T"]]}
    (folder / "stacks.jsonl").write_text(json.dumps(stack) + "\n")


def write_pair(root: Path, **settings: Any) -> tuple[Path, Path]:
    """A clean run, and one in which rank 2 computes something else in step 1."""
    return (
        write_ranks(root / "baseline", **settings),
        write_ranks(root / "candidate", fault=(1, 2), **settings),
    )


def written(folder: Path, names: Iterable[str] = FILES) -> dict[str, bytes]:
    """The files of a result, without the time it took, and without the page, which says it among other things."""
    content = {name: (folder / name).read_bytes() for name in names if name != "report.html"}
    if "summary.json" in content:
        summary = json.loads(content["summary.json"])
        assert summary.pop("elapsed_s") >= 0
        content["summary.json"] = json.dumps(summary).encode()
    return content


def listed(folder: Path) -> list[str]:
    """The names in a folder, hidden ones too."""
    return sorted(entry.name for entry in folder.iterdir())

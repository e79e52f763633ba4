"""Measured columns made by hand, in memory: for everything that judges. No run, no tensor, no disk.

    measured = step(
        call("Functional.linear.0.forward", row("input.0"), row("output.0", error=1e-3, key="y")),
        call("Functional.gelu.0.forward", row("input.0", error=1e-3, key="y"), row("output.0", error=1e-3)),
    )

A row is a pair of tensors with values of RMS 1 and a greatest value of 3, whose relative L2 error is `error`. Rows with the same
`key` hold the same pair of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from tensorprobe.model import DTYPES, Level
from tensorprobe.model.call import forward_name
from tensorprobe.model.comparison import FIGURES, Buckets, Finding
from tensorprobe.model.measured import DIGEST, NONE, SIDES, STATISTICS, VALUES, Calls, Measured, Rows
from tensorprobe.model.reason import Unmeasured
from tensorprobe.pairing.tensor_pairs import number_pairs

_fresh_keys = count()
_COUNTS = ("count", "set_apart", "different", "nonfinite_different", "max_abs_index", "nonfinite_index")


@dataclass
class HandRow:
    slot: str
    key: Any
    dtype: str
    shape: tuple[int, ...]
    basis: int
    grad: bool
    figures: dict[str, Any]
    why: Unmeasured | None
    role: str


@dataclass
class HandCall:
    name: str
    rows: tuple[HandRow, ...]
    module: str = ""
    candidate_module: str | None = None
    structural: int = 0
    index: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


def row(
    slot: str,
    error: float = 0.0,
    *,
    key: Any = None,
    dtype: str = "float32",
    shape: tuple[int, ...] = (64, 64),
    basis: int | None = None,
    grad: bool = False,
    why: Unmeasured | None = None,
    role: str = "",
    **figures: Any,
) -> HandRow:
    """One pair of tensors; `figures` replace those that follow from `error`, `why` makes it an unmeasured one."""
    size = math.prod(shape)
    usual: dict[str, Any] = {
        **{name: figure.equal for name, figure in FIGURES.items()},
        "count": size, "different": size if error else 0, "max_abs": 3 * error, "max_abs_index": 0 if error else -1,
        "max_rel": error, "mean_abs": error, "relative_l2": error, "one_minus_cosine": error**2 / 2,
        "nonfinite_index": -1, "bit_identical": not error, "set_apart": 0,
    }  # fmt: skip
    for side in ("baseline", "candidate"):
        usual |= {f"{side}_max": 3.0, f"{side}_min": -3.0, f"{side}_mean": 0.0, f"{side}_norm": math.sqrt(size)}
        usual |= {f"{side}_nan": 0, f"{side}_inf": 0}
    assert set(figures) <= set(usual), set(figures) - set(usual)
    if basis is None:
        basis = NONE if why else VALUES if error or figures else DIGEST
    key = f"fresh {next(_fresh_keys)}" if key is None else key
    return HandRow(slot, key, dtype, shape, basis, grad, {**usual, **figures}, why, role)


def call(name: str, *rows: HandRow, **more: Any) -> HandCall:
    return HandCall(name, rows, **more)


def step(*calls: HandCall, step: int = 0, rank: int = 0, findings: tuple[Finding, ...] = ()) -> Measured:
    """The columns of one step of one rank."""
    rows = [row for each in calls for row in each.rows]
    sides = np.array([SIDES.index(row.slot.partition(".")[0]) for row in rows], dtype=np.int8)
    of_call = np.repeat(np.arange(len(calls)), [len(each.rows) for each in calls])
    names = [each.name for each in calls]
    backward = np.array([bool(forward_name(name)) for name in names], dtype=bool)
    contents: dict[Any, int] = {}
    content = tuple(
        np.array(
            [contents.setdefault(held, len(contents)) for row in rows for held in (_held(row)[side],)], dtype=np.int64
        )
        for side in (0, 1)
    )
    layout = np.zeros(len(rows), dtype=np.int64)
    differing = np.array([row.basis in (VALUES, STATISTICS) for row in rows], dtype=bool)
    codes = np.array([DTYPES[row.dtype].code for row in rows], dtype=np.int16)
    columns = {
        name: np.array([row.figures[name] for row in rows], dtype=_kind(name))
        for name in (rows[0].figures if rows else ())
    }
    return Measured(
        step=step,
        rank=rank,
        calls=Calls(
            name=names,
            candidate=names,
            op=[name.rsplit(".", 2)[0] for name in names],
            index=[at if each.index is None else each.index for at, each in enumerate(calls)],
            repeat=[0] * len(calls),
            level=[Level.of(name) for name in names],
            direction=["backward" if back else "forward" for back in backward],
            module=[each.module for each in calls],
            candidate_module=[
                each.module if each.candidate_module is None else each.candidate_module for each in calls
            ],
            stack=[None] * len(calls),
            candidate_stack=[None] * len(calls),
            forward=[names.index(other) if (other := forward_name(name)) in names else -1 for name in names],
            structural=[each.structural for each in calls],
            first_row=np.cumsum([0, *(len(each.rows) for each in calls)])[:-1].tolist(),
        ),
        rows=Rows(
            call=of_call,
            slot=[row.slot for row in rows],
            side=sides,
            made=(sides == SIDES.index("output")) | ((sides == SIDES.index("parameters")) & backward[of_call]),
            dtypes=(codes, codes),
            dtype_names=([row.dtype for row in rows], [row.dtype for row in rows]),
            shapes=([row.shape for row in rows], [row.shape for row in rows]),
            basis=np.array([row.basis for row in rows], dtype=np.int8),
            content=(content[0], content[1]),
            layout=layout,
            key=number_pairs(content, layout, differing),
            grad=np.array([row.grad for row in rows], dtype=bool),
            other_bits=np.zeros(len(rows), dtype=bool),
            note=["" if row.why is None else row.why.value for row in rows],
            figures=columns,
            unmeasured={at: row.why for at, row in enumerate(rows) if row.why is not None},
            roles={at: row.role for at, row in enumerate(rows) if row.role},
        ),
        contents=list(contents),
        layouts=[None],
        buckets=Buckets(paired=len(calls)),
        findings=list(findings),
        findings_left_out=0,
    )


def _held(row: HandRow) -> tuple[Any, Any]:
    """What each side holds, by the key of a row; a pair is given as one."""
    if isinstance(row.key, tuple):
        return row.key
    return (row.key, row.key) if row.basis == DIGEST else (f"{row.key} a", f"{row.key} b")


def only_in_baseline(name: str, index: int) -> Finding:
    """The finding of a call without a partner."""
    return Finding(kind="only_baseline", step=0, rank=0, index=index, call=name)


def _kind(name: str) -> Any:
    if name == "bit_identical":
        return bool
    return np.int64 if name in _COUNTS or name.endswith(("_nan", "_inf")) else float

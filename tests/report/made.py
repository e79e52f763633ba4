"""Comparisons made by hand: each function gives a sound struct, and takes what the test wants to be different."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tensorprobe.model.call import Frame
from tensorprobe.model.comparison import (
    COLUMNS,
    SCHEMA_VERSION,
    Buckets,
    Comparison,
    Divergence,
    External,
    Finding,
    RankAnswer,
    Row,
    RunSide,
)

HOSTILE = "=cmd|' /C calc'!A0\x1b[31m\n::error::boo\r%0A`x`|<b>@all</b>&]]>,\x00\u202e"
"""A name that tries to command a terminal, a spreadsheet, a build server and a web page."""


def row(**changes: Any) -> Row:
    """An output of a matmul that diverges."""
    facts: dict[str, Any] = dict.fromkeys(COLUMNS, math.nan)
    facts.update(dict.fromkeys(("baseline_nan", "baseline_inf", "candidate_nan", "candidate_inf"), 0))
    facts.update(
        step=3, rank=0, index=40, repeat=0, level="api", direction="forward", module="layers.7.mlp.down_proj",
        call="Torch.matmul.12.forward", candidate_call="Torch.matmul.12.forward", slot="output.0", side="output",
        baseline_dtype="bfloat16", candidate_dtype="bfloat16", baseline_shape="[8, 4096]", candidate_shape="[8, 4096]",
        basis="values", bit_identical=False, count=32768, set_apart=0, different=9, max_abs=0.031, max_abs_index=4 * 4096 + 17,
        relative_l2=0.24, nonfinite_different=0, nonfinite_index=-1, verdict="diverges", judged_by="relative_l2",
        measured=0.24, allowed=0.016, status="introduced", note="", producer=-1,
    )  # fmt: skip
    return Row(**{**facts, **changes})


def divergence(**changes: Any) -> Divergence:
    """A call with that output, and a line of the user's program."""
    facts: dict[str, Any] = {
        "step": 3,
        "rank": 0,
        "index": 40,
        "call": "Torch.matmul.12.forward",
        "candidate_call": "Torch.matmul.12.forward",
        "level": "api",
        "direction": "forward",
        "module": "layers.7.mlp.down_proj",
        "status": "introduced",
        "inputs": "identical",
        "input_error": 0.0,
        "row": row(),
        "place": [4, 17],
        "source": Frame("model.py", 88, "forward", "y = x @ w"),
    }
    return Divergence(**{**facts, **changes})


def finding(**changes: Any) -> Finding:
    """A call that only the baseline made."""
    facts: dict[str, Any] = {
        "kind": "only_baseline",
        "step": 0,
        "rank": 0,
        "index": 7,
        "call": "Torch.add.3.forward",
        "module": "layers.0",
        "suggestion": "Torch.add.2.forward",
        "source": Frame("model.py", 12, "forward", "x + y"),
    }
    return Finding(**{**facts, **changes})


def structural(**changes: Any) -> Divergence:
    """A divergence that is a difference of structure."""
    about = changes.pop("finding", None) or finding()
    facts: dict[str, Any] = {
        "step": about.step, "rank": about.rank, "index": about.index, "call": about.call, "candidate_call": "",
        "module": about.module, "status": "structural", "row": None, "place": [], "source": about.source, "finding": about,
    }  # fmt: skip
    return divergence(**{**facts, **changes})


def external(**changes: Any) -> External:
    """A weight that is not the same from the start."""
    facts: dict[str, Any] = {
        "kind": "parameter",
        "name": "layers.3.weight",
        "step": 0,
        "rank": 0,
        "call": "Functional.linear.3.forward",
        "slot": "input.1",
        "detail": "scaled by 1.01",
    }
    return External(**{**facts, **changes})


def side(path: str = "runs/npu", **changes: Any) -> RunSide:
    """A run that was closed, with everything recorded that was not filtered."""
    facts: dict[str, Any] = {
        "path": path,
        "calls": 1203,
        "closed": True,
        "devices": ["npu:0"],
        "torch": "2.13.0",
        "mode": "tensor",
        "seen": 1300,
        "recorded": 1203,
        "filtered": 97,
        "failed": 0,
        "blind_spots": {},
    }
    return RunSide(**{**facts, **changes})


def comparison(**changes: Any) -> Comparison:
    """Two runs that part at a matmul; `divergence=None` gives two runs that agree."""
    agrees = changes.get("divergence", ...) is None
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tool": "0.1.0",
        "policy": "noise-aware",
        "answer": "agrees" if agrees else "diverged",
        "exit_code": 0 if agrees else 1,
        "divergence": divergence(),
        "first_difference": None,
        "externals": [],
        "untold": [],
        "findings": [],
        "findings_total": len(changes.get("findings", [])),
        "ranks": [rank_answer(divergence=changes.get("divergence", divergence()))],
        "steps": [0, 1, 2, 3],
        "buckets": Buckets(paired=1196, only_baseline=5, only_candidate=2, skipped={"no tensor": 1}),
        "statuses": {"agrees": 1196} if agrees else {"agrees": 1187, "introduced": 1, "inherited": 8},
        "rows": 5120,
        "bases": {"values": 4000, "digest": 1120},
        "notes": [],
        "baseline": side("runs/cuda", devices=["cuda:0"]),
        "candidate": side(),
        "output": None,
        "elapsed_s": 3.25,
    }
    return Comparison(**{**facts, **changes})


def agreeing(**changes: Any) -> Comparison:
    """Two runs that agree in every call."""
    return comparison(**{"divergence": None, "buckets": Buckets(paired=1196), **changes})


def rank_answer(rank: int = 0, **changes: Any) -> RankAnswer:
    """The answer of one rank; it agrees when it has no divergence."""
    held = changes.get("divergence")
    facts = {"rank": rank, "answer": "diverged" if held else "agrees", "divergence": held, "statuses": {}}
    return RankAnswer(**{**facts, **changes})


def hostile() -> Comparison:
    """A comparison in which every text that comes from a run is hostile."""
    bad = HOSTILE
    bad_row = row(call=bad, candidate_call=bad, module=bad, slot=bad, baseline_dtype=bad, judged_by=bad, note=bad)
    frame = Frame(bad, 1, bad, bad)
    bad_finding = finding(call=bad, module=bad, detail=bad, suggestion=bad, source=frame)
    at = divergence(call=bad, candidate_call=bad, module=bad, row=bad_row, source=frame)
    return comparison(
        divergence=at,
        first_difference=msgspec.structs.replace(at, step=0),
        findings=[bad_finding],
        externals=[external(name=bad, detail=bad, call=bad, slot=bad), external(kind="data", name=bad, detail=bad)],
        ranks=[rank_answer(0, divergence=at), rank_answer(1, divergence=msgspec.structs.replace(at, rank=1))],
        buckets=Buckets(paired=1196, skipped={bad: 1}),
        notes=[bad],
        policy=bad,
        baseline=side(bad, devices=[bad], torch=bad, mode=bad, blind_spots={bad: 2}),
        candidate=side(bad, devices=[bad], torch=bad, mode=bad, blind_spots={bad: 2}),
        output=bad,
    )


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Rows as the columns of a table."""
    return {name: [getattr(held, name) for held in rows] for name in COLUMNS}

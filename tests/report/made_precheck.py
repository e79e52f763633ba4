"""Prechecks made by hand: each function gives a sound struct, and takes what the test wants to be different."""

from __future__ import annotations

from typing import Any

from tensorprobe.model.call import Frame
from tensorprobe.model.precheck import CallCheck, Checked, Precheck


def checked(**changes: Any) -> Checked:
    """An output that passes."""
    facts: dict[str, Any] = {
        "direction": "forward",
        "slot": "output.0",
        "device_dtype": "torch.float32",
        "reference_dtype": "torch.float64",
        "shape": [8, 16],
        "result": "pass",
        "judged_by": "relative_l2",
        "measured": 1e-8,
        "allowed": 2e-7,
        "one_minus_cosine": 1e-12,
        "relative_l2": 1e-8,
        "max_abs": 2e-8,
        "max_rel": 3e-8,
    }
    return Checked(**{**facts, **changes})


def wrong(**changes: Any) -> Checked:
    """An output that fails."""
    return checked(
        **{
            "result": "fail",
            "measured": 0.031,
            "message": "forward output.0: relative_l2 0.031, allowed 2e-07",
            **changes,
        }
    )


def check(call: str = "Functional.softmax.0.forward", **changes: Any) -> CallCheck:
    """A call that passes forward and backward."""
    facts: dict[str, Any] = {
        "call": call,
        "op": call.rsplit(".", 2)[0],
        "step": 0,
        "rank": 0,
        "line": 3,
        "module": "layers.0.attn",
        "forward": "pass",
        "backward": "pass",
        "message": "",
        "details": [checked(), checked(direction="backward")],
        "source": Frame("model.py", 88, "forward", "y = F.softmax(x, -1)"),
        "data": "random",
    }
    return CallCheck(**{**facts, **changes})


def failing(call: str = "Functional.softmax.0.forward", **changes: Any) -> CallCheck:
    """A call that fails forward."""
    facts = {"forward": "fail", "message": wrong().message, "details": [wrong(), checked(direction="backward")]}
    return check(call, **{**facts, **changes})


def skipped(call: str = "Torch.empty.0.forward", **changes: Any) -> CallCheck:
    """A call that could not be run."""
    facts: dict[str, Any] = {
        "forward": "skip",
        "backward": "skip",
        "message": "empty returns memory that is not initialised",
    }
    return check(call, **{**facts, "details": [], "data": "", **changes})


def precheck(*checks: CallCheck, **changes: Any) -> Precheck:
    """A precheck of these calls, with counts that are right."""
    counts = {"pass": 0, "fail": 0, "skip": 0}
    backward = dict(counts)
    reasons: dict[str, int] = {}
    for one in checks:
        directions = (one.forward, one.backward)
        verdict = "fail" if "fail" in directions else "pass" if "pass" in directions else "skip"
        counts[verdict] += 1 + len(one.equal)
        backward[one.backward] += 1 + len(one.equal)
        if verdict == "skip":
            reasons[one.message] = reasons.get(one.message, 0) + 1 + len(one.equal)
    facts: dict[str, Any] = {
        "schema_version": 1,
        "tool": "0.1.0",
        "run": "runs/a",
        "device": "npu",
        "data": "random",
        "standard": "noise-aware",
        "exit_code": 1 if counts["fail"] else 0 if counts["pass"] else 2,
        "calls": sum(counts.values()),
        "distinct": len(checks),
        "passed": counts["pass"],
        "failed": counts["fail"],
        "skipped": counts["skip"],
        "reasons": reasons,
        "backward_passed": backward["pass"],
        "backward_failed": backward["fail"],
        "checks": list(checks),
        "output": None,
        "notes": [],
        "elapsed_s": 2.0,
    }
    return Precheck(**{**facts, **changes})

"""The proof of `tensorprobe doctor`: what capture, the record and compare do with calls whose numbers are known."""

from __future__ import annotations

import tempfile

from tensorprobe.engine.comparison import compare
from tensorprobe.model import CaptureLevel
from tensorprobe.taps.self_test import find_problem, record_known_calls


def prove(device: str) -> dict[str, str]:
    """Return for each level `works`, or what failed on this device."""
    return {str(level): _prove_level(str(level), device) for level in CaptureLevel}


def _prove_level(level: str, device: str) -> str:
    for mode in ("tensor", "summary"):
        problem = find_problem(level, mode, device)
        if problem:
            return problem
    with tempfile.TemporaryDirectory(prefix="tensorprobe-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            for name in ("first", "again", "wrong"):
                record_known_calls(f"{folder}/{name}", level, "tensor", device, wrong=name == "wrong")
            if compare(f"{folder}/first", f"{folder}/again").divergence is not None:
                return "two equal trainings are said to diverge"
            if compare(f"{folder}/first", f"{folder}/wrong").divergence is None:
                return "a training with a wrong weight is said to agree"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "works"

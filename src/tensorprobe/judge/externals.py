"""Tensors that differ where they enter a call, by the name the user knows: `layers.3.weight`."""

from __future__ import annotations

from tensorprobe.model.comparison import External
from tensorprobe.model.measured import STATISTICS, Entering, Measured
from tensorprobe.ops import argument_name

_PURE = 1e-9
"""If 1 - cosine is below this, the difference is a pure scale."""


def external_of(measured: Measured, entering: Entering) -> External:
    """Return which tensor differs where it enters a call, and how."""
    calls, rows = measured.calls, measured.rows
    call, slot = entering.call, rows.slot[entering.row]
    argument = argument_name(calls.op[call], slot)
    module = calls.module[call]
    if argument and entering.kind in ("parameter", "data"):
        name = f"{module}.{argument}" if module else argument
    else:
        name = f"{slot} of {calls.name[call]}"
    return External(
        kind=entering.kind,
        name=name,
        step=measured.step,
        rank=measured.rank,
        call=calls.name[call],
        slot=slot,
        detail=_detail(measured, entering.row),
        origin=entering.origin,
    )


def _detail(measured: Measured, row: int) -> str:
    figures = {name: column[row] for name, column in measured.rows.figures.items()}
    if measured.rows.basis[row] == STATISTICS and figures["baseline_norm"] != figures["baseline_norm"]:
        return f"max {figures['baseline_max']:.6g} in baseline, {figures['candidate_max']:.6g} in candidate"
    if measured.rows.basis[row] == STATISTICS:
        return f"norm {figures['baseline_norm']:.6g} in baseline, {figures['candidate_norm']:.6g} in candidate"
    if figures["nonfinite_different"] > 0:
        return f"NaN or infinity differs in {figures['nonfinite_different']:,} places"
    if figures["one_minus_cosine"] < _PURE and abs(figures["slope"] - 1) >= 0.9 * figures["relative_l2"] > 0:
        return f"scaled by {figures['slope']:.6g}"
    if (
        figures["bias"]
        and abs(figures["mean_abs"] - abs(figures["bias"])) <= 1e-5 * figures["mean_abs"]
        and (figures["max_abs"] <= 1.001 * abs(figures["bias"]))
    ):
        return f"shifted by {figures['bias']:.6g}"
    share = figures["different"] / max(int(figures["count"]), 1)
    return f"max |Δ| {figures['max_abs']:.3g}, relative {figures['relative_l2']:.3g}, {share:.0%} of the elements"

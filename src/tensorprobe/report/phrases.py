"""Phrases about one tensor, one figure or one place, which all reports share.

In: rows, numbers and names. Out: phrases on one line. What comes from a run goes through `show`, which makes it harmless.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from tensorprobe.model.call import Frame
from tensorprobe.model.comparison import COUNT, ERROR, FIGURES, Column, Row
from tensorprobe.text import counted, few, plain

Show = Callable[[object], str]
_NO_FIGURE = Column("")
_OVER = {"1e2": "1 %", "1e3": "0.1 %", "1e4": "0.01 %"}
_WORDS = {
    **{f"over_{limit}": f"elements off by more than {share}:" for limit, share in _OVER.items()},
    **{f"share_over_{limit}": f"share of elements off by more than {share}:" for limit, share in _OVER.items()},
    "beyond_rounding": "largest error beyond the rounding of its element",
}


def tensor(row: Row, show: Show = plain) -> str:
    """Return `output.0 (bfloat16 [8, 4096])`, and what the candidate has instead."""
    dtype, shape = row.candidate_dtype, row.candidate_shape
    changes = [
        show(there)
        for here, there in ((row.baseline_dtype, dtype), (row.baseline_shape, shape))
        if there and there != here
    ]
    other = f", {' '.join(changes)} in the candidate" if changes else ""
    return f"{show(row.slot)} ({show(row.baseline_dtype)} {show(row.baseline_shape)}{other})"


def errors(row: Row, place: Iterable[int] = (), show: Show = plain) -> str:
    """Return the usual figures of a row, the one that decided, and its limit."""
    parts = []
    if row.nonfinite_different > 0:
        first = _position(row.nonfinite_index, row.baseline_shape)
        parts.append(
            f"NaN/inf in {counted(row.nonfinite_different, 'place')}" + (f", first at {first}" if first else "")
        )
    if not math.isnan(row.max_abs):
        index = list(place)  # if NaN or inf differ, this is their index
        at = _position(row.max_abs_index, row.baseline_shape) or (str(index) if index else "")
        parts.append(f"{figure('max_abs', row.max_abs)}{f' at {at}' if at else ''}{_limit(row, 'max_abs')}")
    if not math.isnan(row.relative_l2):
        parts.append(f"{figure('relative_l2', row.relative_l2)}{_limit(row, 'relative_l2')}")
    if row.basis == "statistics":
        parts += _statistics(row)
    elif row.judged_by == "bit_identical":
        parts.append("no difference in any bit is allowed")
    elif row.judged_by not in ("", "max_abs", "relative_l2", "nonfinite_different"):
        parts.append(f"{figure(row.judged_by, row.measured, show)}{_limit(row, row.judged_by)}")
    return ", ".join(parts) or show(row.note or "nothing was measured")


def _statistics(row: Row) -> list[str]:
    """Return what is known of a pair without values: norms, maxima, and the limit."""
    known = not math.isnan(row.baseline_norm) and not math.isnan(row.candidate_norm)
    norms = [f"norm {row.baseline_norm:.6g} in baseline, {row.candidate_norm:.6g} in candidate"] if known else []
    greatest = f"max {row.baseline_max:.6g} and {row.candidate_max:.6g}"
    said = {"max_abs": "difference of the greatest elements", "relative_l2": "relative difference of the norms"}
    words = said.get(row.judged_by)
    return [
        *norms,
        greatest,
        *([f"{words} {_number(row.measured, ERROR)} (allowed {_number(row.allowed, ERROR)})"] if words else []),
    ]


def figure(name: str, value: float, show: Show = plain) -> str:
    """Return `max |Δ| 3.1e-02`, or the name alone if there is no value."""
    column = FIGURES.get(name, _NO_FIGURE)
    words = column.words or _WORDS.get(name) or show(name.replace("_", " "))
    return words if math.isnan(value) else f"{words} {_number(value, column.form)}"


def inside(module: str, show: Show = plain) -> str:
    """Return ` in module 'layers.7.mlp'`, or nothing for a call outside of all modules."""
    shown = show(module)
    return "" if not module else f" in module {shown if show is not plain else repr(shown)}"


def tally(numbers: Mapping[str, int], show: Show = plain) -> str:
    """`jit.script 2, compiled 1`."""
    return ", ".join(f"{show(reason)} {count:,}" for reason, count in numbers.items())


def ranks_of(ranks: Iterable[int], *, limit: int = 8) -> str:
    """`rank 3`, `ranks 0, 1, 2`."""
    numbers = list(map(str, sorted(ranks)))
    return f"rank{'' if len(numbers) == 1 else 's'} {few(numbers, limit)}"


def below(file: str, root: str) -> str:
    """Return a file by its path in the folder `root`, if it is there."""
    return file.removeprefix(root.rstrip("/") + "/") if root else file


def place_of(frame: Frame, show: Show = plain) -> str:
    """`model.py:88`."""
    return show(f"{frame.file}:{frame.line}")


def _limit(row: Row, name: str) -> str:
    if row.judged_by != name or math.isnan(row.allowed):
        return ""
    return f" (allowed {_number(row.allowed, FIGURES.get(name, _NO_FIGURE).form)})"


def _number(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if form == COUNT and value == int(value):
        return f"{int(value):,}"
    return f"{value:{form}}"


def _position(flat: int, shape: str) -> str:
    """Return a flat index as an index in the shape, as it is if the shape cannot be read, or nothing."""
    if flat < 0:
        return ""
    try:
        sizes = json.loads(shape)
    except (ValueError, RecursionError):
        return f"element {flat:,}"
    if not isinstance(sizes, list) or not all(isinstance(length, int) and length > 0 for length in sizes):
        return f"element {flat:,}"
    index: list[int] = []
    for length in reversed(sizes):
        flat, inside = divmod(flat, length)
        index.insert(0, inside)
    return str(index)

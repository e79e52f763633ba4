"""The result tables of msprobe: for dumps with values, with statistics alone, and with digests.

In: pairs of lines. Out: columns in the order of msprobe. Dumps with values are judged by the rule of 2024; statistics by
what rounding explains; digests by being equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy

from tensorprobe.legacy.compared.paired import Array, Paired, join
from tensorprobe.legacy.compared.tables import (
    BLIND_TO_SCALE,
    MESSAGE,
    NOTHING,
    STACK_COLUMN,
    Columns,
    Lines,
    Spelled,
    StackOf,
    Statistics,
    TableStyle,
)
from tensorprobe.legacy.msprobe import logger
from tensorprobe.model import Call, Summary
from tensorprobe.record import Damage, Run

GRADIENTS = ".parameters_grad"


def _spell(call: Call) -> list[Spelled]:
    gradients = f"{call.op.removesuffix(GRADIENTS)}{GRADIENTS}.{call.number}" if call.direction == "backward" else ""
    return [
        (
            _line_name(call.name, slot.name, gradients),
            f"torch.{slot.dtype}",
            str(list(slot.shape)),
            None if slot.summary is None else _statistics(slot.summary),
        )
        for slot in call.slots
    ]


def _line_name(call: str, slot: str, gradients: str) -> str:
    side, _, rest = slot.partition(".")
    if side == "parameters" and gradients:
        return f"{gradients}.{rest}"
    return f"{call}.{side}.{rest.removeprefix('kwargs.')}"


def _statistics(held: Summary) -> Statistics:
    """max, min, mean, norm; then whether there is a NaN in the tensor, which tells a NaN from what is not known."""
    return float(held.max), float(held.min), float(held.mean), float(held.norm), held.nan


_STATISTICS = ("max", "min", "mean", "l2norm")
_DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
_RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
_HEAD = ("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape")
_ERRORS = ("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")
_SUMMARIES = tuple(f"{who} {kind}" for who in ("NPU", "Bench") for kind in _STATISTICS)
_ACCURACY, _RESULT, FILES = "Accuracy Reached or Not", "Result", "Data_name"
_DIGESTS = ("NPU MD5", "BENCH MD5")
TENSOR_COLUMNS = (*_HEAD, *_ERRORS, *_SUMMARIES, _ACCURACY, MESSAGE)
STATISTICS_COLUMNS = (*_HEAD, *_DIFFERENCES, *_RELATIVE, *_SUMMARIES, _RESULT, MESSAGE)
DIGEST_COLUMNS = (*_HEAD, *_DIGESTS, _RESULT, MESSAGE)

_DIGEST_KINDS = ("crc32:", "md5:")
"""What the digests of a dump begin with, and those of our own runs do not."""
_LOOKED_AT = 200
"""Calls that tell what a dump holds."""
_STATUS = {"introduced": "introduced by this call", "inherited": "inherited", "amplified": "noise that was amplified"}


def _head(paired: Paired) -> Columns:
    return {
        **paired.both("Name", lambda lines: lines.name),
        **paired.both("Dtype", lambda lines: lines.dtype),
        **paired.both("Tensor Shape", lambda lines: lines.shape),
    }


def _summaries(paired: Paired) -> Columns:
    columns: Columns = {}
    for at, kind in enumerate(_STATISTICS):
        columns |= paired.both(kind, lambda lines, at=at: _statistic(lines, at))  # type: ignore[misc]
    return columns


def _statistic(lines: Lines, at: int) -> list[Any]:
    """What is known; a NaN where the tensor has one."""
    return [
        NOTHING if held is None else held[at] if held[at] == held[at] or held[-1] else NOTHING
        for held in lines.statistics
    ]


def _ordered(columns: Columns, order: Sequence[str], paired: Paired, stack: StackOf | None) -> Columns:
    ordered = {name: columns[name] for name in order}
    return ordered if stack is None else {**ordered, STACK_COLUMN: paired.stacks(stack)}


def _lay_out_tensors(paired: Paired, stack: StackOf | None) -> Columns:
    relative, shown = paired.column("relative_l2"), paired.shown
    with numpy.errstate(all="ignore"):
        distance = relative * paired.column("baseline_norm")
    distance[relative == 0] = 0.0
    beside_zero = numpy.isinf(relative)  # a bench of zeros: the distance is the NPU's own length
    distance[beside_zero] = paired.column("candidate_norm")[beside_zero]
    distances = numpy.array(shown(distance), dtype=object)
    distances[(paired.strange > 0).astype(bool)] = NOTHING
    columns = {
        **_head(paired),
        "Cosine": shown(1 - paired.column("one_minus_cosine")),
        "EucDist": distances.tolist(),
        "MaxAbsErr": shown(paired.column("max_abs")),
        "MaxRelativeErr": shown(paired.column("max_rel")),
        "One Thousandth Err Ratio": shown(paired.column("within_1e3")),
        "Five Thousandths Err Ratio": shown(paired.column("within_5e3")),
        **_summaries(paired),
        _ACCURACY: paired.accuracy({"agrees": "Yes", "diverges": "No"}).tolist(),
        MESSAGE: paired.messages().tolist(),
    }
    ordered = _ordered(columns, TENSOR_COLUMNS, paired, stack)
    if any(paired.npu.file) or any(paired.bench.file):
        names = paired.both("file", lambda lines: [file or NOTHING for file in lines.file]).values()
        ordered[FILES] = [str(list(pair)) for pair in zip(*names, strict=True)]
    return ordered


def _lay_out_statistics(paired: Paired, stack: StackOf | None) -> Columns:
    columns = {**_head(paired), **_summaries(paired)}
    ours, theirs = (_numbers(lines, at) for lines, at in zip((paired.npu, paired.bench), paired.at, strict=True))
    with numpy.errstate(all="ignore"):
        difference = numpy.where(ours == theirs, 0.0, ours - theirs)  # inf - inf is no number, and no difference
        relative = numpy.where(difference == 0, 0.0, numpy.abs(difference / theirs))
    difference[~paired.paired | paired.unfit] = numpy.nan
    relative[numpy.isnan(difference) | numpy.isinf(relative)] = numpy.nan
    for at, (name, share) in enumerate(zip(_DIFFERENCES, _RELATIVE, strict=True)):
        columns[name] = [value if value == value else NOTHING for value in difference[:, at].tolist()]
        columns[share] = [f"{value * 100:.12g}%" if value == value else NOTHING for value in relative[:, at].tolist()]
    result, messages = paired.accuracy({"agrees": "pass", "diverges": "warning"}), paired.messages()
    status, is_input = paired.text("status"), paired.text("side") == "input"
    result[(result == "warning") & (status == "introduced") & ~is_input] = "error"
    judged_by, measured, allowed = paired.text("judged_by"), paired.column("measured"), paired.column("allowed")
    for row in numpy.flatnonzero(numpy.isin(result, STATISTICS.bad)).tolist():
        beyond = (
            f"{judged_by[row]} {measured[row]:.3g}, allowed {allowed[row]:.3g}" if measured[row] > allowed[row] else ""
        )
        whose = "differs already where it was made" if is_input[row] else _STATUS.get(status[row], "")
        messages[row] = join(beyond, whose, messages[row])
    return _ordered(
        {**columns, _RESULT: result.tolist(), MESSAGE: messages.tolist()}, STATISTICS_COLUMNS, paired, stack
    )


def _numbers(lines: Lines, at: Array) -> Array:
    """The statistics of one side as numbers, a row for each row of the table; NaN where nothing is known."""
    unknown = (numpy.nan,) * len(_STATISTICS)
    held = [unknown if known is None else known[: len(_STATISTICS)] for known in lines.statistics]
    return numpy.array([*held, unknown], dtype=numpy.float64)[at]


def _lay_out_digests(paired: Paired, stack: StackOf | None) -> Columns:
    ours, theirs = paired.both("", lambda lines: [held or "" for held in lines.digest]).values()
    result, messages = paired.accuracy({}), paired.messages()
    later = paired.npu.later_digests != paired.bench.later_digests
    for row in numpy.flatnonzero(paired.paired & ~paired.unfit & ~paired.is_number).tolist():
        kinds = {digest.partition(":")[0] for digest in (ours[row], theirs[row])}
        if len(kinds) == 1 and "" not in kinds:
            result[row] = "pass" if ours[row] == theirs[row] else "Different"
            if result[row] == "Different" and later and paired.same_statistics(row):
                result[row] = NOTHING
                messages[row] = join(
                    "statistics agree; the published msprobe takes the digest after later writes", messages[row]
                )
        else:
            messages[row] = join("no digests of one kind on both sides", messages[row])
    columns = {
        **_head(paired),
        **{
            title: [digest.rpartition(":")[2] or NOTHING for digest in held]
            for title, held in zip(_DIGESTS, (ours, theirs), strict=True)
        },
        _RESULT: result.tolist(),
        MESSAGE: messages.tolist(),
    }
    return _ordered(columns, DIGEST_COLUMNS, paired, stack)


TENSOR = TableStyle(
    logger=logger,
    policy="seed-2024",
    rule="No: Cosine < 0.99 and MaxAbsErr > 0.001, or Cosine < 0.9, or MaxAbsErr > 1",
    blindness=BLIND_TO_SCALE,
    verdict=_ACCURACY,
    good="Yes",
    bad=("No",),
    figures=(*_ERRORS, *_SUMMARIES),
    logged=("Cosine", "MaxAbsErr"),
    spell=_spell,
    lay_out=_lay_out_tensors,
    files=".pt, .npy",
    numbers=True,
)
STATISTICS = TableStyle(
    logger=logger,
    policy="noise-aware",
    rule="warning, error: more than rounding and the inputs explain",
    blindness="An error that keeps maximum, minimum, mean and norm is not seen; more of what was found",
    verdict=_RESULT,
    good="pass",
    bad=("error", "warning"),
    figures=(*_DIFFERENCES, *_RELATIVE, *_SUMMARIES),
    logged=_DIFFERENCES,
    spell=_spell,
    lay_out=_lay_out_statistics,
    bases=("values", "digest", "statistics"),
    files="",
    numbers=True,
)
DIGEST = TableStyle(
    logger=logger,
    policy="bitwise",
    rule="Different: other bits",
    blindness="A digest tells that bits differ, and not by how much; what the statistics say",
    verdict=_RESULT,
    good="pass",
    bad=("Different",),
    figures=(),
    logged=_DIGESTS,
    spell=_spell,
    lay_out=_lay_out_digests,
    bases=("values", "digest", "statistics", "none"),
    files="",
    numbers=True,
)


def choose_style(npu: Run, bench: Run) -> TableStyle:
    """The table that both dumps have the figures for; when one has more than the other, the log says so."""
    ours, theirs = _holds(npu), _holds(bench)
    if "values" in ours ^ theirs:
        who, other = ("NPU", "bench") if "values" in ours else ("bench", "NPU")
        logger.warning("the %s dump has values, the %s dump has not: they are compared without", who, other)
    common = ours & theirs
    return TENSOR if "values" in common else DIGEST if "digests" in common else STATISTICS


def _holds(run: Run) -> set[str]:
    """Whether the first calls of a run have values, and digests of an older tool."""
    held = {"values"} if run.manifest.settings.get("mode") == "tensor" else set()
    for place in run.segments()[:1]:
        for item in islice(run.segment(*place).calls(), _LOOKED_AT):
            for slot in () if isinstance(item, Damage) else item[1].slots:
                if slot.has_data:
                    held.add("values")
                if slot.digest is not None and slot.digest.startswith(_DIGEST_KINDS):
                    held.add("digests")
    return held

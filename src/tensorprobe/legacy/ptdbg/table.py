"""The result table of ptdbg_ascend: its columns, its words, and the rule of 2023."""

from __future__ import annotations

from tensorprobe.legacy.compared.form import BLIND_TO_SCALE, MESSAGE, STACK_COLUMN, Columns, Form
from tensorprobe.legacy.compared.lines import Lines
from tensorprobe.legacy.compared.paired import NOTHING, Paired, StackOf
from tensorprobe.legacy.ptdbg import logger
from tensorprobe.legacy.ptdbg.lines import spell_for

# The guide's prose has "Npu Tensor Dtype" and "MaxAbsError"; the files that the tool wrote have these.
COLUMNS = (
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape", "Cosine", "MaxAbsErr",
    "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean", "Accuracy Reached or Not", "Err_message",
)  # fmt: skip
_STATISTICS = ("max", "min", "mean")
_VERDICT = "Accuracy Reached or Not"


def _lay_out(paired: Paired, stack: StackOf | None) -> Columns:
    columns: Columns = {
        **paired.both("Name", lambda lines: lines.name),
        **paired.both("Tensor Dtype", lambda lines: lines.dtype),
        **paired.both("Tensor Shape", lambda lines: lines.shape),
        "Cosine": paired.shown(1 - paired.column("one_minus_cosine")),
        "MaxAbsErr": paired.shown(paired.column("max_abs")),
    }
    for at, kind in enumerate(_STATISTICS):
        columns |= paired.both(kind, lambda lines, at=at: _statistic(lines, at))  # type: ignore[misc]
    columns[_VERDICT] = paired.accuracy({"agrees": "Yes", "diverges": "No"}).tolist()
    columns[MESSAGE] = paired.messages().tolist()
    columns = {name: columns[name] for name in COLUMNS}
    return columns if stack is None else {**columns, STACK_COLUMN: paired.stacks(stack)}


def _statistic(lines: Lines, at: int) -> list[float | str]:
    return [NOTHING if held is None else held[at] for held in lines.statistics]


FORM = Form(
    logger=logger,
    policy="seed-2023",
    rule="No: Cosine < 0.99 and MaxAbsErr > 0.001",
    blindness=BLIND_TO_SCALE,
    verdict=_VERDICT,
    good="Yes",
    bad=("No",),
    figures=COLUMNS[6:14],
    logged=("Cosine", "MaxAbsErr"),
    spell_for=spell_for,
    lay_out=_lay_out,
)

"""A measured and judged step as record batches: the rows of the result table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy
import pyarrow as pa

from tensorprobe.judge.graph import makers_of
from tensorprobe.model.comparison import COLUMNS, STATUSES
from tensorprobe.model.measured import BASES, JUDGED, SIDES, VERDICTS, Measured, Opinions
from tensorprobe.report.table import arrow_schema

BATCH_ROWS = 65_536
_LEAST, _MOST = -(2**63), 2**63 - 1


def batches_of(measured: Measured, opinion: Opinions) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one step of one rank in bounded batches."""
    calls, rows = measured.calls, measured.rows
    by_call: dict[str, Sequence[str]] = {
        "call": calls.name,
        "candidate_call": calls.candidate,
        "level": calls.level,
        "direction": calls.direction,
        "module": calls.module,
    }
    texts = {name: _encoded(values) for name, values in by_call.items()}
    index, repeat = _integers(calls.index), _integers(calls.repeat)
    producers = _producers(measured)
    producer_lines = numpy.where(producers >= 0, index[producers] if len(index) else -1, -1)
    for start in range(0, len(rows.slot), BATCH_ROWS):
        part = slice(start, min(start + BATCH_ROWS, len(rows.slot)))
        call = rows.call[part]
        size = len(call)
        columns: dict[str, Any] = {
            "step": numpy.full(size, measured.step),
            "rank": numpy.full(size, measured.rank),
            "index": index[call],
            "repeat": repeat[call],
            "slot": _texts(rows.slot[part]),
            "side": _coded(rows.side[part], SIDES),
            "baseline_dtype": _texts(rows.dtype_names[0][part]),
            "candidate_dtype": _texts(rows.dtype_names[1][part]),
            "baseline_shape": _texts(rows.shapes[0][part]),
            "candidate_shape": _texts(rows.shapes[1][part]),
            "basis": _coded(rows.basis[part], BASES),
            "verdict": _coded(opinion.verdict[part], VERDICTS),
            "judged_by": _coded(opinion.judged_by[part], JUDGED),
            "measured": opinion.measured[part],
            "allowed": opinion.allowed[part],
            "status": _coded(opinion.status[call], STATUSES),
            "note": _texts(rows.note[part]),
            "producer": producer_lines[part],
        }
        for name, (codes, words) in texts.items():
            columns[name] = pa.DictionaryArray.from_arrays(codes[call], words)
        columns |= {name: column[part] for name, column in rows.figures.items()}
        columns["bit_identical"] = columns["bit_identical"].astype(bool)
        table = pa.table({name: columns[name] for name in COLUMNS}).cast(arrow_schema())
        yield from table.to_batches()


def _producers(measured: Measured) -> Any:
    """Return for each row the position of the last call before that made its tensor in the baseline; -1 where none did."""
    rows, made = measured.rows, makers_of(measured, 0)
    return numpy.where((made >= 0) & ~rows.made.astype(bool), rows.call[made], -1) if len(made) else made


def _integers(values: Sequence[int]) -> Any:
    """Return a column of integers. Values beyond 64 bits, which only a forged run has, are clipped."""
    try:
        return numpy.array(values, dtype=numpy.int64)
    except OverflowError:
        return numpy.array([min(max(value, _LEAST), _MOST) for value in values], dtype=numpy.int64)


def _encoded(values: Sequence[Hashable]) -> tuple[Any, pa.Array]:
    """Return the codes and words of a column with many equal texts or shapes."""
    words: defaultdict[Hashable, int] = defaultdict(count().__next__)
    codes = numpy.fromiter(map(words.__getitem__, values), dtype=numpy.int32, count=len(values))
    texts = [str(list(word)) if isinstance(word, tuple) else word for word in words]
    return codes, pa.array(texts, type=pa.string())


def _texts(values: Sequence[Hashable]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(*_encoded(values))


def _coded(codes: Any, words: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(codes.astype(numpy.int32), pa.array(list(words), type=pa.string()))

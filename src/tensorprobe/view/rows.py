"""Rows of a result table for the page, page by page: filtered, sorted, read when they are asked for.

In: the table of a comparison on disk or in memory, and a query as the page sends it. Out: rows as JSON. Columns are read when
a query first needs them and kept; the answers to the last few queries are kept as positions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from tensorprobe.model.comparison import COLUMNS, FIGURES
from tensorprobe.report.page.comparison import STATUSES, Calls, call_table, form_of
from tensorprobe.report.table import arrow_schema, demand_values

MOST_ROWS = 1000
"""Rows in one answer."""
_KEPT = 8
_TEXTS = ("call", "module", "slot", "baseline_dtype", "baseline_shape", "judged_by")
_NAMES = {"candidate": "candidate_call", "dtype": "baseline_dtype", "shape": "baseline_shape"}
"""Columns that the page calls something else."""
_OF_CALLS = ("call", "candidate", "module", "step", "rank", "index", "status", "direction", "level")
_OF_ROWS = ("slot", "side", "dtype", "shape", "verdict", "judged_by", "basis", "note", "measured", "allowed")
_MOST_TEXT = 2000


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the page asks for, as `web/src/filter.ts` has it. `range` is from and to (step, line of the call), within `rank`."""

    text: str = ""
    regex: bool = False
    statuses: tuple[int, ...] = ()
    nonfinite: bool = False
    outputs: bool = False
    module: str = ""
    rank: int = -1
    step: int = -1
    range: tuple[tuple[int, int], tuple[int, int]] | None = None
    sort: str = ""
    descending: bool = True


class BadQuery(Exception):
    """A query that cannot be answered, with the reason for the reader."""


class TableView:
    """A result table, open for queries."""

    def __init__(self, held: Path | Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self._held = held
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._answers: OrderedDict[Query, pa.Array] = OrderedDict()

    @property
    def total(self) -> int:
        """The number of rows."""
        return len(self.column("index"))

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column. Only this one is read from a Parquet file; of other tables all are."""
        if name not in self._columns:
            if isinstance(self._held, Path):
                with parquet.ParquetFile(self._held) as file:
                    held = file.read(columns=[name])
                demand_values(held, self._held)
                self._columns[name] = held.cast(pa.schema([arrow_schema().field(name)]))[name]
            else:
                table = pa.Table.from_batches(list(self._held()), schema=arrow_schema()).unify_dictionaries()
                self._columns = {each: table[each] for each in table.column_names}
        return self._columns[name]

    def columns(self) -> list[dict[str, str]]:
        """Return the columns that the page may show."""
        words = {"call", "candidate", "module", "status", "direction", "level", *_OF_ROWS[:8]}
        named = [*_OF_CALLS, *_OF_ROWS, *(name for name in FIGURES if name != "bit_identical")]
        kinds = [
            {
                "id": name,
                "kind": "word" if name in words else "integer" if name in _OF_CALLS else "number",
                "form": form_of(name),
            }
            for name in named
        ]
        return [*kinds, {"id": "ratio", "kind": "number", "form": "ratio2"}]

    def find(self, query: Query) -> pa.Array:
        """Return the positions of the rows that fit, in the order that is asked for. BadQuery if it cannot be."""
        if query in self._answers:
            self._answers.move_to_end(query)
            return self._answers[query]
        found = self._sorted(self._fitting(query), query)
        self._answers[query] = found
        while len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        return found

    def _fitting(self, query: Query) -> pa.Array:
        keep: Any = None

        def both(mask: Any) -> None:
            nonlocal keep
            keep = mask if keep is None else compute.and_(keep, mask)

        if query.statuses:
            words = [status for code, status in enumerate(STATUSES) if code in query.statuses]
            both(self._words_fit("status", lambda texts: compute.is_in(texts, pa.array(words, pa.string()))))
        if query.module:
            inside = query.module + "."
            both(
                self._words_fit(
                    "module",
                    lambda texts: compute.or_(compute.equal(texts, query.module), compute.starts_with(texts, inside)),
                )
            )
        if query.outputs:
            both(self._words_fit("side", lambda texts: compute.not_equal(texts, "input")))
        if query.nonfinite:
            both(compute.greater(self.column("nonfinite_different"), 0))
        for name, wanted in (("rank", query.rank), ("step", query.step)):
            if wanted >= 0:
                both(compute.equal(self.column(name), wanted))
        if query.range is not None:
            both(self._between(*query.range))
        for part in [query.text] if query.regex else query.text.split():
            both(self._mentions(part, query.regex))
        if keep is None:
            return pa.array(range(self.total), pa.int64())
        return compute.indices_nonzero(keep).cast(pa.int64())

    def _between(self, first: tuple[int, int], last: tuple[int, int]) -> Any:
        step, index = self.column("step"), self.column("index")
        after = compute.or_(
            compute.greater(step, first[0]),
            compute.and_(compute.equal(step, first[0]), compute.greater_equal(index, first[1])),
        )
        before = compute.or_(
            compute.less(step, last[0]), compute.and_(compute.equal(step, last[0]), compute.less_equal(index, last[1]))
        )
        return compute.and_(after, before)

    def _mentions(self, text: str, regex: bool) -> Any:
        if len(text) > _MOST_TEXT:
            raise BadQuery(f"the text has {len(text):,} characters; at most {_MOST_TEXT:,} are looked for")
        match = compute.match_substring_regex if regex else compute.match_substring
        hit: Any = None
        for name in _TEXTS if text else ():
            own = self._words_fit(name, lambda texts: match(texts, text, ignore_case=True))
            hit = own if hit is None else compute.or_(hit, own)
        return hit if hit is not None else pa.chunked_array([pa.array([True] * self.total)])

    def _words_fit(self, name: str, test: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
        """Return which rows have a word that passes; each distinct word is tested once."""
        chunks = []
        for chunk in self.column(name).chunks:
            passes = test(chunk.dictionary)
            chunks.append(passes.take(chunk.indices))
        return pa.chunked_array(chunks, pa.bool_())

    def _sorted(self, found: pa.Array, query: Query) -> pa.Array:
        if not query.sort:
            return found
        key = self._sort_key(query.sort).take(found)
        order = compute.sort_indices(key, sort_keys=[("", "descending" if query.descending else "ascending")])
        return found.take(order)

    def _sort_key(self, name: str) -> Any:
        if name == "ratio":
            return compute.divide(self.column("measured"), self.column("allowed"))
        held = _NAMES.get(name, name)
        if held not in COLUMNS:
            raise BadQuery(f"there is no column {name!r}")
        column = self.column(held)
        return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column

    def rows(self, query: Query, first: int, last: int, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows from `first` up to `last` of those that fit. BadQuery for too many, or a column that is not there."""
        if not 0 <= first <= last or last - first > MOST_ROWS:
            raise BadQuery(f"rows {first} to {last} were asked for; at most {MOST_ROWS:,} in order are given")
        positions = self.find(query).slice(first, last - first)
        wanted = {name: self._cells(name, positions) for name in {"slot", "verdict", *columns}}
        places = [self.column(name).take(positions).to_pylist() for name in ("step", "rank", "index")]
        codes = {status: code for code, status in enumerate(STATUSES)}
        statuses = self.column("status").take(positions).to_pylist()
        return [
            {
                "key": key,
                "place": [column[at] for column in places],
                "status": codes.get(statuses[at], 0),
                "cells": {name: column[at] for name, column in wanted.items()},
            }
            for at, key in enumerate(positions.to_pylist())
        ]

    def _cells(self, name: str, positions: pa.Array) -> list[Any]:
        if name == "ratio":
            held = compute.divide(self.column("measured").take(positions), self.column("allowed").take(positions))
            return list(held.to_pylist())
        if _NAMES.get(name, name) not in COLUMNS:
            raise BadQuery(f"there is no column {name!r}")
        values = self.column(_NAMES.get(name, name)).take(positions).to_pylist()
        if name in ("dtype", "shape"):
            other = self.column(f"candidate_{name}").take(positions).to_pylist()
            values = [a if a == b else f"{a} → {b}" for a, b in zip(values, other, strict=True)]
        return list(values)

    def position(self, query: Query, place: tuple[int, int, int], slot: str) -> int:
        """Return where a tensor of a call, or its first, is among the rows that fit; -1 if it is not."""
        own = self.rows_of(place)
        if not len(own):
            return -1
        slots = self.column("slot").take(own).to_pylist()
        wanted = own[slots.index(slot)] if slot in slots else own[0]
        return int(compute.index(self.find(query), wanted).as_py())

    def rows_of(self, place: tuple[int, int, int]) -> pa.Array:
        """Return the positions of the rows of a call."""
        keep = None
        for name, wanted in zip(("step", "rank", "index"), place, strict=True):
            own = compute.equal(self.column(name), wanted)
            keep = own if keep is None else compute.and_(keep, own)
        return compute.indices_nonzero(keep).cast(pa.int64())

    def calls(self, rank: int) -> Calls:
        """Return the calls of one rank."""
        keep = compute.equal(self.column("rank"), rank)
        names = (
            "step",
            "rank",
            "index",
            "call",
            "candidate_call",
            "module",
            "direction",
            "level",
            "status",
            "side",
            "judged_by",
        )
        figures = ("nonfinite_different", "relative_l2", "allowed", "measured", "producer")
        table = pa.table({name: self.column(name).filter(keep) for name in (*names, *figures)})
        return call_table(table.unify_dictionaries().combine_chunks())


def read_query(text: str) -> Query:
    """Return a query. BadQuery when it is none."""
    try:
        return msgspec.json.decode(text.encode(), type=Query)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise BadQuery(f"the query cannot be read: {error}") from None

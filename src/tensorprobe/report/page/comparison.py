"""The page of a comparison: its summary, its evidence, and the rows of its table.

In: the structs of a result and its batches of rows. Out: a `Page`. Rows are streamed twice: first they are counted, then those
that fit are packed, the worst statuses first. No run is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensorprobe.model.comparison import FIGURES, Comparison, Divergence
from tensorprobe.model.diff import CallEvidence
from tensorprobe.report import wording
from tensorprobe.report.compare_text import first_difference, look_at, other_ranks
from tensorprobe.report.page.data import (
    MOST_ROWS,
    Column,
    Command,
    First,
    Item,
    Page,
    Side,
    Table,
    Tone,
    Verdict,
    coded,
    integers,
    matrix,
    numbers,
)
from tensorprobe.report.pattern import pattern_words
from tensorprobe.text import shell

if TYPE_CHECKING:
    import pyarrow as pa

Batches = Callable[[], "Iterable[pa.RecordBatch]"]

STATUSES: dict[str, Tone] = {
    "agrees": "good",
    "unmeasured": "quiet",
    "amplified": "warn",
    "inherited": "warn",
    "structural": "bad",
    "entered": "bad",
    "introduced": "bad",
}
"""From harmless to the cause of everything."""
_CODES = {name: code for code, name in enumerate(STATUSES)}
_TONES: dict[str, Tone] = {"DIVERGED": "bad", "AGREES": "good", "UNFINISHED": "warn", "CANNOT TELL": "warn"}
FIGURES_SHOWN = (
    *("measured", "allowed", "max_abs", "relative_l2", "max_rel", "one_minus_cosine", "ulp_max"),
    *("different", "nonfinite_different"),
)
"""The figures in a page; with `full` all of them."""
_OTHERS = 8
"""Places of other ranks that are listed."""
_OUTPUT_FIGURES = ("measured", "allowed")
_PATH = re.compile(r"(^|[\s'\"=:])(~|[A-Za-z]:)?[/\\]")
"""What looks like the path of a file."""
_WORDS = ("slot", "side", "verdict", "judged_by", "basis")


def comparison_page(
    summary: Comparison,
    batches: Batches,
    evidence: Sequence[CallEvidence] = (),
    *,
    full: bool = False,
    source: bool = True,
    rows: bool = True,
) -> Page:
    """Return the page. `full` packs every row and figure; without `rows` none is packed, because a server has them."""
    if not source:
        summary, evidence = _without_paths(summary), [_without_code(one) for one in evidence]
    counted = count_rows(batches)
    held = _pack(batches, counted, full=full) if rows else _Packed(None, None, None, "", {})
    divergence = summary.divergence
    words = [[pattern_words(tensor.pattern) for tensor in one.tensors] for one in evidence]
    return Page(
        kind="compare",
        tool=summary.tool,
        title=f"{summary.baseline.path} → {summary.candidate.path}" if source else "",
        verdict=_verdict(summary),
        first=None if divergence is None else _first(divergence, summary),
        counts=_counts(summary),
        total_calls=wording.total_calls(summary),
        statuses=list(STATUSES),
        tones=list(STATUSES.values()),
        sides=[_side("baseline", summary), _side("candidate", summary)],
        commands=_commands(summary) if source else [],
        notes=[*summary.notes, *wording.proving(summary), wording.measured_by(summary)],
        differing=wording.differing(summary),
        before=[*wording.before_first_call(summary), *([ended] if (ended := wording.ended(summary)) else [])],
        structure=[
            line
            for line in (*wording.regions(summary), wording.found_in_all(summary), wording.why_unpaired(summary))
            if line
        ],
        items=[_item(finding) for finding in summary.findings],
        items_total=max(summary.findings_total, len(summary.findings)),
        evidence=list(evidence),
        pattern_words=words,
        matrix=matrix(counted.worst),
        measure="relative_l2",
        calls=held.calls,
        producers=held.producers,
        rows=held.rows,
        selected=held.find(divergence),
        left_out=held.left_out,
        source=source,
    )


def _verdict(summary: Comparison) -> Verdict:
    headline = wording.headline(summary)
    lines = [wording.evidence(summary.divergence)] if summary.divergence is not None else []
    lines += [*other_ranks(summary, _OTHERS), *first_difference(summary)]
    lines += [line for line in (wording.cause(summary), wording.counts(summary)) if line]
    return Verdict(
        tone=_TONES.get(headline, "quiet"), headline=headline, sentence=wording.verdict(summary), lines=lines
    )


def _first(divergence: Divergence, summary: Comparison) -> First:
    row, proof, finding = divergence.row, divergence.proof, divergence.finding
    structural = finding is not None and (divergence.status == "structural" or row is None)
    facts: dict[str, Any] = {}
    if row is not None and not structural:
        facts = {
            "slot": row.slot,
            "dtype": row.baseline_dtype
            if row.baseline_dtype == row.candidate_dtype
            else f"{row.baseline_dtype} → {row.candidate_dtype}",
            "shape": row.baseline_shape
            if row.baseline_shape == row.candidate_shape
            else f"{row.baseline_shape} → {row.candidate_shape}",
            "place": str(divergence.place) if divergence.place else "",
            "figure": FIGURES[row.judged_by].words or row.judged_by if row.judged_by in FIGURES else "",
            "measured": row.measured,
            "allowed": row.allowed,
            "max_abs": row.max_abs,
            "relative_l2": row.relative_l2,
            "nonfinite": max(0, row.nonfinite_different),
        }
    return First(
        step=divergence.step,
        rank=divergence.rank,
        index=divergence.index,
        call=divergence.call or divergence.candidate_call,
        candidate_call=divergence.candidate_call,
        module=divergence.module,
        status=divergence.status,
        inputs=divergence.inputs,
        input_error=divergence.input_error,
        proof=None if proof is None else (proof.baseline, proof.candidate),
        wrong=[] if proof is None else [side for side in ("baseline", "candidate") if getattr(proof, f"{side}_wrong")],
        unproved=divergence.unproved,
        pattern=divergence.pattern,
        pattern_words=wording.pattern(summary),
        message="" if finding is None else wording.structure(finding) + wording.nearest(finding),
        source=divergence.source,
        **facts,
    )


def _counts(summary: Comparison) -> dict[str, int]:
    """Return how many calls are in which bucket: statuses of the pairs, calls without a partner, skipped ones."""
    buckets = summary.buckets
    counts = {name: summary.statuses.get(name, 0) for name in reversed(STATUSES)}
    counts["not_judged"] = buckets.paired - sum(summary.statuses.values())
    counts["in_regions"] = buckets.in_regions
    counts["only_baseline"], counts["only_candidate"] = buckets.only_baseline, buckets.only_candidate
    counts["skipped"] = sum(buckets.skipped.values())
    return {name: count for name, count in counts.items() if count}


def _side(role: str, summary: Comparison) -> Side:
    side = summary.baseline if role == "baseline" else summary.candidate
    facts = [fact for fact in (side.mode, *side.devices[:4], f"torch {side.torch}" if side.torch else "") if fact]
    return Side(role=role, path=side.path, facts=facts, coverage=wording.coverage(side))


def _commands(summary: Comparison) -> list[Command]:
    made = []
    divergence = summary.divergence
    runs = f"{shell(summary.baseline.path)} {shell(summary.candidate.path)}"
    if divergence is not None:
        made.append(Command(key="look", text=look_at(summary, divergence)))
        if summary.replay and summary.output:
            script = shell(summary.output.rstrip("/") + "/" + summary.replay)
            made.append(Command(key="replay", text=f"python {script}"))
        elif divergence.candidate_call:
            where = f"--steps {divergence.step} --ranks {divergence.rank}"
            call = f"{shell(summary.candidate.path)} --call {shell(divergence.candidate_call)}"
            made.append(Command(key="replay", text=f"tensorprobe audit {call} {where} --save-failures -o replayed"))
    made.append(Command(key="view", text=f"tensorprobe view {shell(summary.output) if summary.output else runs}"))
    return made


def _item(finding: Any) -> Item:
    return Item(
        kind=finding.kind,
        call=finding.call,
        module=finding.module,
        step=finding.step,
        rank=finding.rank,
        detail=finding.detail,
        suggestion=finding.suggestion.removeprefix("nearest: "),
        source=finding.source,
    )


class Counted(NamedTuple):
    """What a first pass over the rows finds."""

    rows: int
    statuses: dict[str, int]
    """Status → number of rows."""
    worst: dict[tuple[int, int], int]
    """(rank, step) → the worst status, as its code."""


def count_rows(batches: Batches) -> Counted:
    """Count the rows of a table."""
    import pyarrow as pa

    total = 0
    statuses: dict[str, int] = {}
    worst: dict[tuple[int, int], int] = {}
    for batch in batches():
        total += batch.num_rows
        table = pa.table({name: batch[name] for name in ("rank", "step", "status")})
        table = table.set_column(2, "status", table["status"].cast(pa.string()))
        for row in table.group_by(["rank", "step", "status"]).aggregate([([], "count_all")]).to_pylist():
            status, place = row["status"], (row["rank"], row["step"])
            statuses[status] = statuses.get(status, 0) + row["count_all"]
            worst[place] = max(worst.get(place, -1), _CODES.get(status, 0))
    return Counted(total, statuses, worst)


class _Packed(NamedTuple):
    calls: Table | None
    producers: Column | None
    rows: Table | None
    left_out: str
    places: dict[tuple[int, int, int], int]

    def find(self, divergence: Divergence | None) -> int:
        """Return the position of a divergence among the calls; -1 if it is not there."""
        if divergence is None:
            return -1
        return self.places.get((divergence.step, divergence.rank, divergence.index), -1)


def _pack(batches: Batches, counted: Counted, *, full: bool) -> _Packed:
    quotas, left_out = _quotas(counted, full)
    chosen = pa_table(_chosen(batches, quotas))
    calls = call_table(chosen)
    names = list(FIGURES) if full else [name for name in FIGURES_SHOWN if name not in _OUTPUT_FIGURES]
    columns = [coded_column(chosen, name) for name in _WORDS]
    columns += [_joined(chosen, "dtype"), _joined(chosen, "shape")]
    columns += [
        numbers(name, chosen[name].to_numpy(), form_of(name))
        for name in (*_OUTPUT_FIGURES, *names)
        if name != "bit_identical"
    ]
    rows = Table(count=chosen.num_rows, total=counted.rows, columns=columns)
    return _Packed(calls.table, calls.producers, rows, left_out, calls.places)


def form_of(name: str) -> str:
    """Return how the page writes a figure."""
    if name not in FIGURES:
        return "error"
    return {".1e": "error", ",.3g": "count"}.get(FIGURES[name].form, "ratio")


def _quotas(counted: Counted, full: bool) -> tuple[dict[str, int], str]:
    """Return how many rows of each status are packed, and what is said of the rest."""
    room = counted.rows if full else MOST_ROWS
    quotas = {}
    for status in reversed(STATUSES):
        quotas[status] = min(room, counted.statuses.get(status, 0))
        room -= quotas[status]
    short = {status: counted.statuses.get(status, 0) - quota for status, quota in quotas.items()}
    left = [f"{count:,} {status}" for status, count in short.items() if count > 0]
    if not left:
        return quotas, ""
    return quotas, f"{sum(quotas.values()):,} of {counted.rows:,} rows are in this file. Not in it: {' · '.join(left)}."


def _chosen(batches: Batches, quotas: dict[str, int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows that are packed, in order: of each status the first ones up to its quota."""
    import pyarrow as pa
    import pyarrow.compute as compute

    room = dict(quotas)
    for batch in batches():
        status = batch["status"].cast(pa.string())
        keep = None
        for name in room:
            own = compute.equal(status, name)
            count = compute.sum(own).as_py() or 0
            if count > room[name]:
                rank = compute.cumulative_sum(own.cast(pa.int64()))
                own = compute.and_(own, compute.less_equal(rank, room[name]))
                count = room[name]
            room[name] -= count
            keep = own if keep is None else compute.or_(keep, own)
        yield batch.filter(keep)


def pa_table(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Return the batches as one table; texts have one dictionary for the whole."""
    import pyarrow as pa

    from tensorprobe.report.table import arrow_schema

    return pa.Table.from_batches(list(batches), schema=arrow_schema()).unify_dictionaries().combine_chunks()


def coded_column(table: pa.Table, name: str, called: str = "") -> Column:
    """Return a column of texts as the page packs it."""
    held = _one(table[name])
    return coded(called or name, held.indices.to_numpy(), held.dictionary.to_pylist())


def _one(column: pa.ChunkedArray) -> Any:
    """Return a column as one array. One without rows has a dictionary too."""
    import pyarrow as pa

    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _joined(table: pa.Table, what: str) -> Column:
    """Return dtypes or shapes of both sides: one text where they are equal."""
    first, second = (_one(table[f"{side}_{what}"]) for side in ("baseline", "candidate"))
    texts = first.dictionary.to_pylist(), second.dictionary.to_pylist()
    pairs: dict[tuple[int, int], int] = {}
    keys = zip(first.indices.to_pylist(), second.indices.to_pylist(), strict=True)
    codes = [pairs.setdefault(key, len(pairs)) for key in keys]
    known = [texts[0][a] if texts[0][a] == texts[1][b] else f"{texts[0][a]} → {texts[1][b]}" for a, b in pairs]
    return coded(what, codes, known)


class Calls(NamedTuple):
    """The calls of some rows."""

    table: Table
    producers: Column
    places: dict[tuple[int, int, int], int]
    """(step, rank, index) → position."""


def call_table(table: pa.Table) -> Calls:
    """Return the calls of rows in execution order: one row each, with the worst of its results."""
    import pyarrow as pa
    import pyarrow.compute as compute

    keys = list(zip(*(table[name].to_pylist() for name in ("step", "rank", "index")), strict=True))
    starts = [at for at, key in enumerate(keys) if not at or key != keys[at - 1]]
    ends = [*starts[1:], len(keys)] if starts else []
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    numbered = pa.array([call for call, size in enumerate(sizes) for _ in range(size)], pa.int64())
    made = compute.not_equal(table["side"].cast(pa.string()), "input")
    error = compute.if_else(compute.greater(table["nonfinite_different"], 0), float("inf"), table["relative_l2"])
    limit = compute.if_else(
        compute.equal(table["judged_by"].cast(pa.string()), "relative_l2"),
        table["allowed"],
        compute.divide(compute.multiply(table["relative_l2"], table["allowed"]), table["measured"]),
    )
    worst = pa.table({"call": numbered, "error": error, "limit": limit}).filter(made)
    greatest = {"error": [float("nan")] * len(starts), "limit": [float("nan")] * len(starts)}
    for name, held in greatest.items():
        known = (
            worst.filter(compute.is_finite(worst[name]))
            if name == "limit"
            else worst.filter(compute.invert(compute.is_nan(worst[name])))
        )
        grouped = known.group_by("call").aggregate([(name, "max")])
        for call, value in zip(grouped["call"].to_pylist(), grouped[f"{name}_max"].to_pylist(), strict=True):
            held[call] = value
    first = table.take(pa.array(starts, pa.int64()))
    places = {keys[start]: call for call, start in enumerate(starts)}
    counts, flat = _producers(table, starts, ends, keys, places)
    status = _one(first["status"])
    codes = [_CODES.get(word, 0) for word in status.dictionary.to_pylist()]
    columns = [
        *(integers(name, first[name].to_numpy()) for name in ("step", "rank", "index")),
        *(
            coded_column(first, name, called)
            for name, called in (
                ("call", "name"),
                ("candidate_call", "candidate"),
                ("module", "module"),
                ("direction", "direction"),
                ("level", "level"),
            )
        ),
        integers("status", [codes[at] for at in status.indices.to_pylist()]),
        *(numbers(name, values) for name, values in greatest.items()),
        integers("rows", sizes),
        integers("producers", counts),
    ]
    return Calls(Table(count=len(starts), total=len(starts), columns=columns), integers("producers", flat), places)


def _producers(
    table: pa.Table, starts: list[int], ends: list[int], keys: list[Any], places: dict[tuple[int, int, int], int]
) -> tuple[list[int], list[int]]:
    """Return for each call the calls that made its inputs: how many, and which, one call after the other."""
    lines = table["producer"].to_pylist()
    counts, flat = [], []
    for start, end in zip(starts, ends, strict=True):
        step, rank, _ = keys[start]
        found = {places[key] for line in lines[start:end] if line >= 0 and (key := (step, rank, line)) in places}
        counts.append(len(found))
        flat += sorted(found)
    return counts, flat


def _without_paths(summary: Comparison) -> Comparison:
    """Return the summary without paths and lines of the program."""
    replace = msgspec.structs.replace

    def hidden(found: Divergence | None) -> Divergence | None:
        return None if found is None else replace(found, source=None)

    return replace(
        summary,
        output=None,
        divergence=hidden(summary.divergence),
        first_difference=hidden(summary.first_difference),
        findings=[replace(finding, source=None) for finding in summary.findings],
        ranks=[replace(rank, divergence=hidden(rank.divergence)) for rank in summary.ranks],
        baseline=replace(summary.baseline, path="baseline"),
        candidate=replace(summary.candidate, path="candidate"),
        notes=[note for note in summary.notes if not _PATH.search(note)],
        differing=[line for line in summary.differing if not _PATH.search(line)],
    )


def _without_code(one: CallEvidence) -> CallEvidence:
    return msgspec.structs.replace(one, source=None, stacks=([], []), arguments=("", ""))

"""What the page shows, as one struct: `web/src/data.ts` has the same fields. Columns are packed, everything else is plain JSON.

A module beside this one makes a `Page` of each kind of result. The page words labels and closed sets in the reader's
language; sentences, numbers and verdicts are made here. Nothing in a `Page` is markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tensorprobe.model.call import Frame
from tensorprobe.model.comparison import FIGURES
from tensorprobe.model.diff import CallEvidence, Pattern
from tensorprobe.model.online import OnlineRow
from tensorprobe.model.precheck import Checked
from tensorprobe.packing import pack_integers, pack_numbers, pack_words
from tensorprobe.text import printable

Kind = Literal["compare", "precheck", "audit", "online", "overflow", "run"]
Tone = Literal["bad", "warn", "good", "quiet"]

WORDS = dict.fromkeys(("slot", "side", "dtype", "shape", "verdict", "judged_by", "message"), "word")
"""The columns of words that every page of checked tensors has."""
MOST_ROWS = 100_000
"""Rows in a page, unless it is made with `full`."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: a word, a sentence, the evidence."""

    tone: Tone
    headline: str
    sentence: str
    lines: list[str] = []
    """More sentences: the evidence, what is said of other ranks, causes."""


class First(msgspec.Struct, frozen=True, kw_only=True):
    """The first call that matters. Texts are empty and numbers NaN where nothing is known."""

    step: int = 0
    rank: int = 0
    index: int = -1
    call: str = ""
    candidate_call: str = ""
    module: str = ""
    status: str = ""
    slot: str = ""
    dtype: str = ""
    shape: str = ""
    place: str = ""
    figure: str = ""
    """What decided, in words."""
    measured: float = math.nan
    allowed: float = math.nan
    max_abs: float = math.nan
    relative_l2: float = math.nan
    nonfinite: int = 0
    """Places where only one side is NaN or infinite."""
    inputs: str = ""
    input_error: float = math.nan
    proof: tuple[float, float] | None = None
    """The error of baseline and candidate against float64."""
    wrong: list[str] = []
    """The sides that are wrong, as the proof says."""
    unproved: str = ""
    """Why there is no proof."""
    pattern: Pattern | None = None
    pattern_words: str = ""
    message: str = ""
    source: Frame | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or what it is compared with."""

    role: str
    path: str
    facts: list[str]
    coverage: str = ""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command that can be copied. `key` says what for: diff, replay, view, inspect, table."""

    key: str
    text: str


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One finding in a list: a call without a partner, other arguments, a region, an op that loses precision."""

    kind: str
    call: str = ""
    module: str = ""
    step: int = -1
    rank: int = -1
    detail: str = ""
    suggestion: str = ""
    source: Frame | None = None


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks and steps: for each pair the worst status (position in `Page.statuses`, -1 for nothing), row by row of ranks."""

    ranks: list[int]
    steps: list[int]
    cells: dict[str, Any]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One packed column. `words` turn its integers into texts."""

    id: str
    kind: Literal["number", "integer", "word"]
    packed: str
    width: int = 0
    words: str = ""
    form: str = ""
    """Of a number: error, ratio or count."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of one length. `total` counts what is not in the page too."""

    count: int
    total: int
    columns: list[Column]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows."""

    kind: Kind
    tool: str
    title: str
    verdict: Verdict
    first: First | None = None
    counts: dict[str, int] = {}
    """Status, or another word → number of calls. They add up to `total_calls`."""
    total_calls: int = 0
    statuses: list[str] = []
    """In the order of severity, the harmless first; columns and the matrix hold positions in this list."""
    tones: list[Tone] = []
    sides: list[Side] = []
    commands: list[Command] = []
    notes: list[str] = []
    differing: list[str] = []
    """What differs about the two programs: `threads: 1 / 8`."""
    before: list[str] = []
    """What differs before the first call, or where a run ended early."""
    structure: list[str] = []
    """Lines about the structure of the two programs."""
    items: list[Item] = []
    items_total: int = 0
    evidence: list[CallEvidence] = []
    pattern_words: list[list[str]] = []
    """For each tensor of each evidence its pattern in words."""
    matrix: Matrix | None = None
    measure: str = ""
    """What the chart shows: relative_l2, greatest, or nothing for no chart."""
    calls: Table | None = None
    """One row a call: step, rank, index, name, module, status, direction, level, error, limit, rows, producers."""
    producers: Column | None = None
    """The calls that made the inputs, call after call; the column `producers` of `calls` counts them."""
    rows: Table | None = None
    """One row a tensor, in the order of the calls."""
    selected: int = -1
    """The call that is shown first: a position in `calls`."""
    left_out: str = ""
    """Which rows are not in the page."""
    source: bool = True
    """Whether lines of the program and paths are in the page."""


def numbers(name: str, values: Any, form: str = "error") -> Column:
    """Return a column of real numbers."""
    return Column(id=name, kind="number", packed=pack_numbers(values), form=form)


def integers(name: str, values: Any) -> Column:
    """Return a column of integers."""
    return Column(id=name, kind="integer", **pack_integers(values))


def words(name: str, values: Iterable[str]) -> Column:
    """Return a column of texts."""
    known: dict[str, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    return coded(name, codes, list(known))


def coded(name: str, codes: Any, dictionary: Sequence[str]) -> Column:
    """Return a column of texts from positions in a list. Control characters become escapes here, once for every form of page."""
    return Column(
        id=name, kind="word", words=pack_words([printable(word) for word in dictionary]), **pack_integers(codes)
    )


def _columns_of(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> list[Column]:
    """Return columns from rows; `kinds` says of each column: word, integer, or the form of a number."""
    made = []
    for name, kind in kinds.items():
        values = [row[name] for row in rows]
        if kind == "word":
            made.append(words(name, values))
        else:
            made.append(integers(name, values) if kind == "integer" else numbers(name, values, kind))
    return made


def matrix(worst: Mapping[tuple[int, int], int]) -> Matrix | None:
    """Return the matrix of (rank, step) → status; None where there is only one of each."""
    ranks, steps = sorted({rank for rank, _ in worst}), sorted({step for _, step in worst})
    if len(ranks) < 2 and len(steps) < 2:
        return None
    cells = [worst.get((rank, step), -1) for rank in ranks for step in steps]
    return Matrix(ranks=ranks, steps=steps, cells=msgspec.to_builtins(integers("cells", cells)))


def judged(row: Checked | OnlineRow) -> dict[str, Any]:
    """Return what `First` holds of a row that was judged."""
    figure = FIGURES[row.judged_by].words if row.judged_by in FIGURES else row.judged_by
    held = {name: getattr(row, name) for name in ("slot", "measured", "allowed", "max_abs", "relative_l2")}
    return {**held, "shape": str(row.shape), "figure": figure}


class CallRow(NamedTuple):
    """One call of a page that is made from a list. `status` is one of the page's statuses."""

    name: str
    status: str
    rows: int
    step: int = 0
    rank: int = 0
    line: int = 0
    module: str = ""
    direction: str = "forward"
    level: str = ""
    error: float = math.nan
    limit: float = math.nan


def listed(
    calls: Sequence[CallRow],
    rows: Sequence[Mapping[str, Any]],
    *,
    statuses: Mapping[str, Tone],
    kinds: Mapping[str, str],
) -> dict[str, Any]:
    """Return the fields of a `Page` that is made from a list: its statuses, its calls and its rows."""
    return {
        "statuses": list(statuses),
        "tones": list(statuses.values()),
        "calls": _call_table(calls, list(statuses)),
        "rows": Table(count=len(rows), total=len(rows), columns=_columns_of(rows, kinds)),
    }


def _call_table(calls: Sequence[CallRow], statuses: Sequence[str]) -> Table:
    """Return the calls as the page reads them. Nothing is known of who made their inputs."""
    codes = {status: code for code, status in enumerate(statuses)}
    columns = [
        *(integers(name, [getattr(call, name) for call in calls]) for name in ("step", "rank", "rows")),
        integers("index", [call.line for call in calls]),
        *(words(name, [getattr(call, name) for call in calls]) for name in ("name", "module", "direction", "level")),
        words("candidate", [""] * len(calls)),
        integers("status", [codes[call.status] for call in calls]),
        *(numbers(name, [getattr(call, name) for call in calls]) for name in ("error", "limit")),
        integers("producers", [0] * len(calls)),
    ]
    return Table(count=len(calls), total=len(calls), columns=columns)

"""The files of a shard in the output folder, and reading them back without trusting them.

`shard-i-of-n.json` says what was asked and what came out, `shard-i-of-n-rankR.parquet` holds the rows of a rank. Shards belong
together when they were asked the same; a shard that is missing, damaged or of another comparison is CannotCompare with
the command that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tensorprobe.engine.output import Output
from tensorprobe.engine.places import Side
from tensorprobe.engine.plan import Plan
from tensorprobe.engine.rank_task import RankResult, RankTask
from tensorprobe.engine.settings import CompareSettings, Prove, TableForm
from tensorprobe.errors import CannotCompare
from tensorprobe.files import demand_file, read_file
from tensorprobe.judge import Policy
from tensorprobe.model.comparison import Ending
from tensorprobe.standard_json import encode
from tensorprobe.text import ranges
from tensorprobe.version import VERSION

FORMAT = "tensorprobe-shard"
MOST_SHARDS = 100_000
_MOST_SHOWN = 300
_BLOCK = 1 << 20
SHARD_FILE = re.compile(r"shard-([1-9][0-9]{0,8})-of-([1-9][0-9]{0,8})\.json")


class Origin(msgspec.Struct, frozen=True):
    """A run: the user's name for it, its address, and when it was recorded."""

    said: str
    address: str
    created: str


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The question of a comparison. Shards with the same question belong together."""

    baseline: Origin
    candidate: Origin
    policy: Policy
    map_text: str | None
    strip_prefix: str | None
    fuzzy: bool
    prove: Prove
    table: TableForm
    workbook: bool
    ranks: list[tuple[int, int, list[tuple[int, int]]]]
    """Every task of the whole comparison: rank, the candidate's rank, steps of both."""
    steps: list[int]
    skipped: dict[str, int]
    notes: list[str]
    endings: list[Ending] = []


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `shard-i-of-n.json`."""

    format: str
    tool: str
    number: int
    of: int
    question: Question
    results: list[RankResult]
    rows: dict[str, str]
    """File with the rows of a rank → its digest."""
    elapsed_s: float


def question_of(sides: tuple[Side, Side], plan: Plan, settings: CompareSettings) -> Question:
    """Return the question of a comparison."""
    task = plan.tasks[0]
    origins = [Origin(side.said, side.address, side.run.manifest.created) for side in sides]
    return Question(
        baseline=origins[0],
        candidate=origins[1],
        policy=task.policy,
        map_text=task.map_text,
        strip_prefix=task.strip_prefix,
        fuzzy=task.fuzzy,
        prove=task.prove,
        table=settings.table,
        workbook=settings.workbook,
        ranks=[(task.rank, task.candidate_rank, task.steps) for task in plan.tasks],
        steps=plan.steps,
        skipped=plan.skipped,
        notes=plan.notes,
        endings=plan.endings,
    )


_SEAL = b'{"digest": "%032b", '


def pack_shard(shard: Shard) -> bytes:
    """Return the content of the file, with a digest of everything in it: a changed figure would pass for a result."""
    return sealed(encode(shard).encode() + b"\n")


def sealed(content: bytes) -> bytes:
    """Return a JSON object with the digest of its text as its first key."""
    return _SEAL % xxhash.xxh3_128_hexdigest(content).encode() + content[1:]


def plan_of(question: Question) -> Plan:
    """Return the plan of the whole comparison, as made for each shard."""
    tasks = [
        RankTask(
            baseline=question.baseline.address,
            candidate=question.candidate.address,
            rank=rank,
            candidate_rank=candidate_rank,
            steps=steps,
            policy=question.policy,
            map_text=question.map_text,
            strip_prefix=question.strip_prefix,
            fuzzy=question.fuzzy,
            prove=question.prove,
        )
        for rank, candidate_rank, steps in question.ranks
    ]
    return Plan(
        tasks=tasks,
        policy=question.policy.name,
        steps=question.steps,
        skipped=question.skipped,
        notes=question.notes,
        endings=question.endings,
    )


def rows_name(number: int, of: int, rank: int) -> str:
    """Return the name of the file with the rows of a rank."""
    return f"shard-{number}-of-{of}-rank{rank}.parquet"


def read_shards(output: Output) -> list[Shard]:
    """Return all shards of the folder, in order. Raises CannotCompare if one is missing, unreadable or of another comparison."""
    found = {
        match[0]: (int(match[1]), int(match[2])) for name in output.names() if (match := SHARD_FILE.fullmatch(name))
    }
    if not found:
        raise CannotCompare(
            f"no shard in '{output.said}'. Make them with: tensorprobe compare BASELINE CANDIDATE -o {output.said} --shard 1/N"
        )
    divisions = sorted({of for _, of in found.values()})
    if len(divisions) > 1:
        held = "; ".join(
            f"of {of}: {ranges(sorted(number for number, n in found.values() if n == of))}" for of in divisions
        )
        raise CannotCompare(
            f"'{output.said}' holds shards of different divisions ({held}).\n  Remove the files of those that are not wanted."
        )
    of = divisions[0]
    if of > MOST_SHARDS:
        raise CannotCompare(
            f"a file in '{output.said}' claims to be one of {of:,} shards; there are at most {MOST_SHARDS:,}."
        )
    there = set(found.values())
    missing = [number for number in range(1, of + 1) if (number, of) not in there]
    if missing:
        raise CannotCompare(
            f"'{output.said}' holds {len(found)} of {of} shards; {ranges(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing.\n  Run it with the same settings and --shard {missing[0]}/{of}."
        )
    names = sorted(found, key=lambda name: found[name])
    shards = [_read_shard(path, found[path.name]) for path in output.held(names)]
    for shard in shards[1:]:
        _demand_same_question(shards[0], shard, output.said)
    return shards


def _read_shard(path: Path, expected: tuple[int, int]) -> Shard:
    again = f"Run it again with --shard {expected[0]}/{expected[1]}."
    raw = read_file(path)
    try:
        shard = msgspec.convert(msgspec.json.decode(raw), Shard, strict=False)  # not strict: "NaN"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CannotCompare(f"'{path.name}' cannot be read as a shard: {error}.\n  {again}") from None
    if shard.format != FORMAT or (shard.number, shard.of) != expected:
        raise CannotCompare(f"'{path.name}' is not what its name says.\n  {again}")
    if shard.tool != VERSION:
        raise CannotCompare(f"'{path.name}' was made by tensorprobe {shard.tool}, this is {VERSION}.\n  {again}")
    if raw != sealed(b"{" + raw[len(_SEAL % b"") :]):
        raise CannotCompare(f"'{path.name}' is damaged: its digest does not match.\n  {again}")
    return shard


def _demand_same_question(first: Shard, other: Shard, place: str) -> None:
    ours, theirs = (msgspec.structs.asdict(shard.question) for shard in (first, other))
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        name = different[0]
        raise CannotCompare(
            f"shards {first.number} and {other.number} of {first.of} in '{place}' do not belong together: "
            f"they differ in {', '.join(different)}.\n"
            f"  {name}: {_shortly(ours[name])} against {_shortly(theirs[name])}. Run one of them again with the settings of the other."
        )


def _shortly(value: Any) -> str:
    text = str(value)
    if isinstance(value, Policy):
        text = f"{value.name}, {len(value.rules)} rules"
    elif isinstance(value, Origin):
        text = f"{value.address} (recorded {value.created})"
    return text if len(text) < _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def read_parts(output: Output, names: dict[int, str], shards: Sequence[Shard]) -> list[Path]:
    """Return the files with the rows, in the order of the ranks. Each must hold what its shard wrote."""
    held = set(output.names())
    for name in names.values():
        if name not in held:
            raise CannotCompare(f"'{name}' is missing in '{output.said}'. Run its shard again.")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    paths = output.held(list(names.values()))
    digests = {name: digest for shard in shards for name, digest in shard.rows.items()}
    rows = {result.rank: sum(answer.rows for answer in result.answers) for shard in shards for result in shard.results}
    for path, rank in zip(paths, names, strict=True):
        try:
            found = parquet.read_metadata(path).num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CannotCompare(f"'{path.name}' is damaged: {error}. Run its shard again.") from None
        if found != rows[rank]:
            raise CannotCompare(f"'{path.name}' holds {found:,} rows, not {rows[rank]:,}. Run its shard again.")
        if digest_of(path) != digests.get(path.name):
            raise CannotCompare(f"'{path.name}' is damaged: its digest does not match. Run its shard again.")
    return paths


def digest_of(path: Path) -> str:
    """Return the digest of a file with rows."""
    demand_file(path)
    with path.open("rb") as file:
        digest = xxhash.xxh3_128()
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

"""Records pairs of programs, compares them, and prints a table: python -m bench.same_model --part open."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.heldout.record import compare, import_all
from bench.same_model import closed, levels, open
from bench.same_model.training import Pair, record

PARTS = {"open": open, "closed": closed, "levels": levels}


@dataclass(frozen=True)
class Outcome:
    """`quiet` and `alarm` of a right pair; `exact`, `region`, `misleading` and `missed` of a fault; `crashed`."""

    word: str
    explained: bool
    text: str
    seconds: float


def run_pair(pair: Pair, kept: Path | None) -> Outcome:
    """Record both programs, unless they are kept from before, and compare them."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="same-model-")) if kept is None else kept / pair.name
    try:
        for side, choices in (("baseline", pair.baseline), ("candidate", pair.candidate)):
            if not (folder / side).exists():
                record(folder / side, choices)
        answer = compare(folder / "baseline", folder / "candidate", **pair.options)
        buckets = answer.get("buckets", {})
        explained = bool(buckets) and not buckets["only_baseline"] and not buckets["only_candidate"]
        word, text = _judge(pair, answer), _text(answer)
    except Exception:
        word, explained, text = "crashed", False, traceback.format_exc()
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    return Outcome(word, explained, text, time.monotonic() - began)


def _judge(pair: Pair, answer: dict[str, Any]) -> str:
    if not pair.guilty:
        return "quiet" if answer["exit_code"] == 0 else "alarm"
    found = answer.get("divergence")
    if found is None:
        return "missed" if answer["exit_code"] == 0 else "unlocated"
    own = [found["call"], found["candidate_call"], (found["entered"] or {}).get("name", "")]
    region = found["region"] or {"baseline": [], "candidate": []}
    for word, names in (("region", [*region["baseline"], *region["candidate"]]), ("exact", own)):
        if found["step"] == pair.step and any(part in name for part in pair.guilty for name in names):
            return word
    return "misleading"


def _text(answer: dict[str, Any]) -> str:
    """Return what to read of an answer: what a refusal says, else the first divergence and the findings."""
    if "text" in answer:
        return str(answer["text"])
    found = answer["divergence"] or {}
    lines = [f"{found.get('status')}: {found.get('call')} | {found.get('candidate_call')} in {found.get('module')}"]
    lines += [f"{one['kind']} {one['call']} {one['region']} {one['detail']}" for one in answer["findings"][:8]]
    lines += [f"entered: {found.get('entered')}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.same_model", description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="open")
    parser.add_argument("--only", default="", help="pairs whose names contain this")
    parser.add_argument("--kind", choices=["healthy", "faults"], help="one of the two tables")
    parser.add_argument("--sample", type=int, default=100, help="per cent of the pairs, the same ones each time")
    parser.add_argument("--jobs", type=int, default=1, help="pairs at the same time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there, and use those that are there")
    parser.add_argument("--verbose", action="store_true", help="print the answer of each pair that failed")
    wanted = parser.parse_args()
    import_all()
    part = PARTS[wanted.part]
    for kind, pairs in (("healthy", part.HEALTHY), ("faults", part.FAULTS)):
        chosen = [
            pair for pair in pairs if wanted.only in pair.name and zlib.crc32(pair.name.encode()) % 100 < wanted.sample
        ]
        if chosen and wanted.kind in (None, kind):
            with ThreadPoolExecutor(wanted.jobs) as pool:
                _print(
                    kind, chosen, list(pool.map(partial(run_pair, kept=wanted.keep), chosen)), verbose=wanted.verbose
                )


def _print(kind: str, pairs: list[Pair], outcomes: list[Outcome], *, verbose: bool) -> None:
    words = [outcome.word for outcome in outcomes]
    total = len(words)
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    print(f"{kind}: {total} pairs: {counts}; {sum(outcome.seconds for outcome in outcomes):.0f} s")
    if kind == "healthy":
        print(f"  structure explained in {sum(outcome.explained for outcome in outcomes)} of {total}")
    for pair, outcome in zip(pairs, outcomes, strict=True):
        if outcome.word not in ("quiet", "exact", "region"):
            print(f"  {outcome.word:<10} {pair.name}")
            if verbose or outcome.word == "crashed":
                print("    " + outcome.text.strip().replace("\n", "\n    "))


if __name__ == "__main__":
    main()
